"""Factorization applied to models."""

from __future__ import annotations

import copy
import math

import pytest
import scipy.linalg
import torch
from torch import nn
from torch.nn.utils import prune

from composer import functional as cf


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.Conv2d(24, 24, 3, groups=2)),
        nn.ConvTranspose2d(24, 24, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 32),
        nn.ReLU(),
        nn.Linear(32, 4),
    )


SMALL = {"min_channels": 16, "min_features": 24}


class TestApplyFactorization:
    @pytest.mark.parametrize(
        ("arguments", "paths"),
        [
            (SMALL, ["2.0", "6"]),
            (SMALL | {"factorize_convs": False}, ["6"]),
            (SMALL | {"factorize_linears": False}, ["2.0"]),
            (SMALL | {"min_channels": 3}, ["0", "2.0", "6"]),
            (SMALL | {"min_channels": 17}, ["6"]),
            (SMALL | {"min_features": 4, "latent_features": 1}, ["2.0", "6", "8"]),
            (SMALL | {"min_features": 25}, ["2.0"]),
            ({}, []),
        ],
    )
    def test_arguments_select_layers(self, arguments: dict[str, float], paths: list[str]):
        """Ungrouped convolutions and linear layers are replaced if they are large enough on both sides."""
        report = cf.apply_factorization(_network(), **arguments)

        assert [path for entry in report for path in entry.paths] == paths

    @pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
    @pytest.mark.parametrize(
        "touch",
        [lambda layer: prune.l1_unstructured(layer, "weight", 0.5), nn.utils.weight_norm, nn.utils.spectral_norm],
    )
    def test_layers_with_computed_weight_are_unchanged(self, touch):
        """Pruning and old normalizations compute the weight in hooks."""
        model = nn.Sequential(touch(nn.Conv2d(24, 24, 3)), touch(nn.Linear(32, 32)))

        assert not cf.apply_factorization(model, **SMALL)

    @pytest.mark.parametrize(("latent", "width"), [(5, 5), (0.5, 8)])
    def test_widths(self, latent: float, width: int):
        """A number, or a fraction of the smaller side."""
        model = _network()

        cf.apply_factorization(model, **SMALL, latent_channels=latent, latent_features=latent)

        assert model[2][0].latent_channels == width
        assert model[6].latent_features == (5 if width == 5 else 12)

    @pytest.mark.parametrize(("latent", "replaced"), [(12, True), (13, True), (14, False), (24, False)])
    def test_linears_are_replaced_only_if_cheaper(self, latent: int, replaced: bool):
        """24 * 32 = 768 multiplications against 56 per latent feature: up to 13 are cheaper."""
        report = cf.apply_factorization(nn.Sequential(nn.Linear(24, 32)), min_features=1, latent_features=latent)

        assert bool(report) == replaced

    @pytest.mark.parametrize(("latent", "replaced"), [(8, True), (9, False)])
    def test_convs_are_replaced_only_if_cheaper(self, latent: int, replaced: bool):
        """10 * 2 * 3 * 10 = 600 multiplications against 60 + 10 = 70 per latent channel."""
        model = nn.Sequential(nn.Conv2d(10, 10, (2, 3), stride=2))

        assert bool(cf.apply_factorization(model, min_channels=1, latent_channels=latent)) == replaced

    def test_equal_cost_is_not_replaced(self):
        """If both variants cost the same, the layer does not change."""
        assert not cf.apply_factorization(nn.Sequential(nn.Linear(4, 4)), min_features=1, latent_features=2)

    def test_weights_are_optimal_for_their_rank(self):
        """Errors equal those of scipy's truncated SVD."""
        model = _network().double()
        old = {path: model.get_submodule(path).weight.detach().flatten(1) for path in ("2.0", "6")}

        cf.apply_factorization(model, **SMALL, latent_channels=6, latent_features=6)

        for path, weight in old.items():
            new = model.get_submodule(path).weight.flatten(1)
            least = math.sqrt((scipy.linalg.svdvals(weight.numpy())[6:] ** 2).sum())
            assert (new - weight).norm().item() == pytest.approx(least)

    def test_low_rank_weights_are_exact(self):
        """Weights of that rank give the same outputs."""
        model, images = _network().double(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
        for layer in (model[2][0], model[6]):
            rows, columns = layer.weight.flatten(1).shape
            layer.weight.data = (torch.randn(rows, 4) @ torch.randn(4, columns)).double().view_as(layer.weight)
        expected = model(images)

        report = cf.apply_factorization(model, **SMALL, latent_channels=4, latent_features=4)

        assert len(report) == 2
        torch.testing.assert_close(model(images), expected)

    def test_is_idempotent(self):
        """Factorized layers are not factorized again, for any width."""
        model = nn.Sequential(nn.Linear(64, 64), nn.Conv2d(64, 64, 3))
        cf.apply_factorization(model, min_channels=1, min_features=1)
        before = str(model)

        assert not cf.apply_factorization(model, min_channels=1, min_features=1)
        assert not cf.apply_factorization(model[0], min_channels=1, min_features=1)
        assert not cf.apply_factorization(model[1], min_channels=1, min_features=1)
        assert str(model) == before

    @pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.AdamW])
    def test_optimizer_updates_all_parameters(self, make):
        """One step of an existing optimizer updates all parameters; unchanged ones keep their state."""
        model = _network()
        optimizer = make(model.named_parameters())
        images = torch.rand(4, 3, 12, 12)
        model(images).square().sum().backward()
        optimizer.step()
        state = {parameter: optimizer.state[parameter] for parameter in model.parameters()}

        cf.apply_factorization(model, **SMALL, optimizers=optimizer)
        before = copy.deepcopy(list(model.parameters()))
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()

        group = optimizer.param_groups[0]
        assert not any(torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
        assert dict(zip(group["param_names"], group["params"], strict=True)) == dict(model.named_parameters())
        survivors = [parameter for parameter in model.parameters() if parameter in state]
        assert len(survivors) == len(state) - 2
        assert all(optimizer.state[parameter] is state[parameter] for parameter in survivors)

    def test_state_dict_keys(self):
        """The weight is replaced by two, and the bias belongs to the second."""
        model = nn.Sequential(nn.Linear(24, 24))

        cf.apply_factorization(model, min_features=24)

        assert list(model.state_dict()) == ["0.first.weight", "0.second.weight", "0.second.bias"]

    def test_hooks_are_moved(self):
        """A hook on the layer is called with its replacement."""
        model = nn.Sequential(nn.Linear(24, 24))
        called: list[nn.Module] = []
        model[0].register_forward_hook(lambda module, args, output: called.append(module))

        cf.apply_factorization(model, min_features=24)
        model(torch.rand(2, 24))

        assert called == [model[0]]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_dtype_device_and_mode_are_preserved(self, dtype: torch.dtype, device: torch.device):
        """The model keeps its dtype, device and mode."""
        model = _network().to(device=device, dtype=dtype).eval()

        cf.apply_factorization(model, **SMALL)

        assert model(torch.rand(2, 3, 12, 12, device=device, dtype=dtype)).dtype == dtype
        assert not any(module.training for module in model.modules())

    def test_memory_format_is_preserved(self):
        """Channels-last kernels stay channels last."""
        model = _network().to(memory_format=torch.channels_last)

        cf.apply_factorization(model, **SMALL)

        assert model[2][0].first.weight.is_contiguous(memory_format=torch.channels_last)
        assert not model[2][0].first.weight.is_contiguous()

    @pytest.mark.parametrize("trained", ["weight", "bias", "neither"])
    def test_requires_grad_is_preserved(self, trained: str):
        """Both weights have the flag of the original weight."""
        model = nn.Sequential(nn.Linear(24, 24), nn.Conv2d(24, 24, 3)).requires_grad_(False)
        for layer in model:
            if trained != "neither":
                getattr(layer, trained).requires_grad_()

        cf.apply_factorization(model, min_channels=24, min_features=24)

        for layer in model:
            assert layer.first.weight.requires_grad == layer.second.weight.requires_grad == (trained == "weight")
            assert layer.second.bias.requires_grad == (trained == "bias")

    def test_shared_layers_stay_shared(self):
        """A layer used twice becomes one layer used twice."""
        linear = nn.Linear(24, 24)
        model = nn.Sequential(linear, nn.ReLU(), linear)

        report = cf.apply_factorization(model, min_features=24)

        assert model[0] is model[2]
        assert [entry.paths for entry in report] == [("0", "2")]

    def test_tied_weights_are_unchanged(self):
        """A head with the embedding's weight does not change."""
        model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.Linear(32, 64))
        model[1].weight = model[0].weight

        report = cf.apply_factorization(model, min_features=32)

        assert [entry.paths for entry in report] == [("2",)]
        assert model[1].weight is model[0].weight

    def test_subclasses_are_unchanged(self):
        """Parametrized and lazy layers, and the output layer of attention, do not change."""
        model = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(24, 24)),
            nn.LazyLinear(24),
            nn.LazyConv2d(24, 3),
            nn.MultiheadAttention(24, 2),
        )

        assert not cf.apply_factorization(model, min_features=1, min_channels=1, latent_features=1, latent_channels=1)

    @pytest.mark.parametrize("training", [True, False])
    def test_transformer_layers_of_torch(self, training: bool):
        """The encoder layer, which reads its linear layers' weights in evaluation, still works."""
        layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.0, batch_first=True).train(training)
        tokens = torch.rand(2, 5, 32)
        for linear in (layer.linear1, layer.linear2):
            linear.weight.data = torch.outer(torch.rand(linear.out_features), torch.rand(linear.in_features))
        with torch.no_grad():
            expected = layer(tokens)

        report = cf.apply_factorization(layer, min_features=32)

        assert len(report) == 2
        with torch.no_grad():
            torch.testing.assert_close(layer(tokens), expected)

    def test_exports(self):
        """The model can be exported."""
        model = _network().eval()
        cf.apply_factorization(model, **SMALL)
        images = torch.rand(2, 3, 12, 12)

        exported = torch.export.export(model, (images,)).module()

        torch.testing.assert_close(exported(images), model(images))

    def test_meta_device(self):
        """A model on the meta device can be changed."""
        with torch.device("meta"):
            model = _network()

        cf.apply_factorization(model, **SMALL)

        assert all(parameter.is_meta for parameter in model.parameters())
        assert model[6].first.weight.shape == (6, 24)

    def test_non_finite_weights_raise(self):
        """The error names the layer, and no layer changes."""
        model = _network()
        model[6].weight.data[0, 0] = torch.nan
        before = str(model)

        with pytest.raises(ValueError, match=r"The weight of 6 must be finite to be factorized"):
            cf.apply_factorization(model, **SMALL)

        assert str(model) == before
        assert cf.apply_factorization(model, **SMALL, factorize_linears=False)

    @pytest.mark.parametrize("layer", [nn.Linear(24, 24), nn.Conv2d(24, 24, 3)])
    def test_root_layer_raises(self, layer: nn.Module):
        """The root cannot be replaced; the error states the remedy."""
        with pytest.raises(ValueError, match=r"that is one itself\. Wrap it"):
            cf.apply_factorization(layer, **SMALL)

    @pytest.mark.parametrize("name", ["min_channels", "min_features"])
    def test_bad_minimum_raises(self, name: str):
        """The minimum is at least 0, and the error names the parameter."""
        with pytest.raises(ValueError, match=f"{name} must be at least 0, got -1"):
            cf.apply_factorization(nn.Sequential(), **{name: -1})

        assert not cf.apply_factorization(nn.Sequential(), **{name: 0})

    @pytest.mark.parametrize("name", ["latent_channels", "latent_features"])
    @pytest.mark.parametrize("latent", [0, 1.0, float("nan")])
    def test_bad_width_raises(self, name: str, latent: float):
        """The error names the parameter."""
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, or a fraction"):
            cf.apply_factorization(nn.Sequential(), **{name: latent})

    def test_non_module_raises(self):
        """Only modules are supported."""
        with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got list"):
            cf.apply_factorization([nn.Linear(24, 24)])


class TestWithOtherSurgery:
    @pytest.mark.parametrize("blur_first", [True, False])
    def test_inside_a_blur(self, blur_first: bool):
        """A blurred convolution is factorized inside its blur."""
        model = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2, padding=1)).double()
        images = torch.randn(2, 16, 9, 9, dtype=torch.float64)
        cf.apply_blurpool(model, blur_first=blur_first)
        model[0].conv.weight.data = torch.einsum("o,ikl->oikl", torch.rand(16), torch.rand(16, 3, 3)).double()
        expected = model(images)

        report = cf.apply_factorization(model, min_channels=16)

        assert [entry.paths for entry in report] == [("0.conv",)]
        torch.testing.assert_close(model(images), expected)

    def test_before_a_blur(self):
        """The strided factor is blurred: the result equals the other order."""
        model = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2, padding=1)).double()
        images = torch.randn(2, 16, 9, 9, dtype=torch.float64)
        cf.apply_factorization(model, min_channels=16)
        one = nn.Conv2d(16, 16, 3, stride=2, padding=1).double()
        one.weight.data, one.bias.data = model[0].weight.data, model[0].bias.data

        report = cf.apply_blurpool(model)

        assert [entry.paths for entry in report] == [("0.first",)]
        torch.testing.assert_close(model(images), cf.BlurConv2d.from_conv2d(one).double()(images))

    def test_standardized_weights_are_unchanged(self):
        """Two factors would not be the standardized weight; in the other order both are standardized."""
        model = nn.Sequential(nn.Conv2d(16, 16, 3))
        cf.apply_weight_standardization(model)

        assert not cf.apply_factorization(model, min_channels=16)

        model = nn.Sequential(nn.Conv2d(16, 16, 3))
        cf.apply_factorization(model, min_channels=16)

        assert [entry.paths for entry in cf.apply_weight_standardization(model)] == [("0.first",), ("0.second",)]

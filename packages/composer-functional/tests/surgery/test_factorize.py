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
    def test_arguments_choose(self, arguments: dict[str, float], paths: list[str]):
        """Convolutions with one group and linear layers are replaced if they are large enough on both sides."""
        report = cf.apply_factorization(_network(), **arguments)

        assert [path for entry in report for path in entry.paths] == paths

    @pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
    @pytest.mark.parametrize(
        "touch",
        [lambda layer: prune.l1_unstructured(layer, "weight", 0.5), nn.utils.weight_norm, nn.utils.spectral_norm],
    )
    def test_layers_with_a_computed_weight_are_left(self, touch):
        """Pruning and old normalisations compute the weight in hooks of the layer."""
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
    def test_linears_only_where_it_saves(self, latent: int, replaced: bool):
        """24 * 32 = 768 multiplications against 56 for each latent feature: up to 13 of them save some."""
        report = cf.apply_factorization(nn.Sequential(nn.Linear(24, 32)), min_features=1, latent_features=latent)

        assert bool(report) == replaced

    @pytest.mark.parametrize(("latent", "replaced"), [(8, True), (9, False)])
    def test_convs_only_where_it_saves(self, latent: int, replaced: bool):
        """10 * 2 * 3 * 10 = 600 multiplications against 60 + 10 = 70 for each latent channel."""
        model = nn.Sequential(nn.Conv2d(10, 10, (2, 3), stride=2))

        assert bool(cf.apply_factorization(model, min_channels=1, latent_channels=latent)) == replaced

    def test_equal_costs_save_nothing(self):
        """Where two layers take as many multiplications as one, the one stays."""
        assert not cf.apply_factorization(nn.Sequential(nn.Linear(4, 4)), min_features=1, latent_features=2)

    def test_weights_are_the_best_of_their_rank(self):
        """Convolutions and linear layers are nearest to what they were, by scipy's singular values."""
        model = _network().double()
        old = {path: model.get_submodule(path).weight.detach().flatten(1) for path in ("2.0", "6")}

        cf.apply_factorization(model, **SMALL, latent_channels=6, latent_features=6)

        for path, weight in old.items():
            new = model.get_submodule(path).weight.flatten(1)
            least = math.sqrt((scipy.linalg.svdvals(weight.numpy())[6:] ** 2).sum())
            assert (new - weight).norm().item() == pytest.approx(least)

    def test_low_rank_weights_lose_nothing(self):
        """A model whose weights have the rank computes what it did."""
        model, images = _network().double(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
        for layer in (model[2][0], model[6]):
            rows, columns = layer.weight.flatten(1).shape
            layer.weight.data = (torch.randn(rows, 4) @ torch.randn(4, columns)).double().view_as(layer.weight)
        expected = model(images)

        report = cf.apply_factorization(model, **SMALL, latent_channels=4, latent_features=4)

        assert len(report) == 2
        torch.testing.assert_close(model(images), expected)

    def test_second_time_changes_nothing(self):
        """What is factorized is not factorized again, however small its halves could be made."""
        model = nn.Sequential(nn.Linear(64, 64), nn.Conv2d(64, 64, 3))
        cf.apply_factorization(model, min_channels=1, min_features=1)
        before = str(model)

        assert not cf.apply_factorization(model, min_channels=1, min_features=1)
        assert not cf.apply_factorization(model[0], min_channels=1, min_features=1)
        assert not cf.apply_factorization(model[1], min_channels=1, min_features=1)
        assert str(model) == before

    @pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.AdamW])
    def test_every_parameter_moves_after_surgery(self, make):
        """One step with the optimizer made before moves all; what survives keeps its state."""
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
        """The weight gives way to two, and the bias is the second's."""
        model = nn.Sequential(nn.Linear(24, 24))

        cf.apply_factorization(model, min_features=24)

        assert list(model.state_dict()) == ["0.first.weight", "0.second.weight", "0.second.bias"]

    def test_hooks_move(self):
        """A hook on the layer is called with what stands in its place."""
        model = nn.Sequential(nn.Linear(24, 24))
        seen: list[nn.Module] = []
        model[0].register_forward_hook(lambda module, args, output: seen.append(module))

        cf.apply_factorization(model, min_features=24)
        model(torch.rand(2, 24))

        assert seen == [model[0]]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_dtype_device_and_mode_are_kept(self, dtype: torch.dtype, device: torch.device):
        """The model runs as the plain one did."""
        model = _network().to(device=device, dtype=dtype).eval()

        cf.apply_factorization(model, **SMALL)

        assert model(torch.rand(2, 3, 12, 12, device=device, dtype=dtype)).dtype == dtype
        assert not any(module.training for module in model.modules())

    def test_memory_format_is_kept(self):
        """Kernels laid out with the channels last stay so."""
        model = _network().to(memory_format=torch.channels_last)

        cf.apply_factorization(model, **SMALL)

        assert model[2][0].first.weight.is_contiguous(memory_format=torch.channels_last)
        assert not model[2][0].first.weight.is_contiguous()

    @pytest.mark.parametrize("trained", ["weight", "bias", "neither"])
    def test_freezing_is_kept(self, trained: str):
        """Two weights are trained if the one was, whatever the bias is."""
        model = nn.Sequential(nn.Linear(24, 24), nn.Conv2d(24, 24, 3)).requires_grad_(False)
        for layer in model:
            if trained != "neither":
                getattr(layer, trained).requires_grad_()

        cf.apply_factorization(model, min_channels=24, min_features=24)

        for layer in model:
            assert layer.first.weight.requires_grad == layer.second.weight.requires_grad == (trained == "weight")
            assert layer.second.bias.requires_grad == (trained == "bias")

    def test_shared_layers_stay_shared(self):
        """One layer in two places becomes one in two places."""
        linear = nn.Linear(24, 24)
        model = nn.Sequential(linear, nn.ReLU(), linear)

        report = cf.apply_factorization(model, min_features=24)

        assert model[0] is model[2]
        assert [entry.paths for entry in report] == [("0", "2")]

    def test_tied_weights_are_left_alone(self):
        """A head that has the weight of the embedding keeps it."""
        model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.Linear(32, 64))
        model[1].weight = model[0].weight

        report = cf.apply_factorization(model, min_features=32)

        assert [entry.paths for entry in report] == [("2",)]
        assert model[1].weight is model[0].weight

    def test_subclasses_are_left_alone(self):
        """Parametrized and lazy layers, and attention's output layer, which attention reads itself."""
        model = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(24, 24)),
            nn.LazyLinear(24),
            nn.LazyConv2d(24, 3),
            nn.MultiheadAttention(24, 2),
        )

        assert not cf.apply_factorization(model, min_features=1, min_channels=1, latent_features=1, latent_channels=1)

    @pytest.mark.parametrize("training", [True, False])
    def test_transformer_layers_of_torch(self, training: bool):
        """The encoder layer, which reads the weights of its linear layers in evaluation, goes on working."""
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

    def test_on_the_meta_device(self):
        """A model without data can be changed before it gets some."""
        with torch.device("meta"):
            model = _network()

        cf.apply_factorization(model, **SMALL)

        assert all(parameter.is_meta for parameter in model.parameters())
        assert model[6].first.weight.shape == (6, 24)

    def test_weights_that_are_not_finite_are_refused(self):
        """The message names the layer, and nothing is changed, in the layers before neither."""
        model = _network()
        model[6].weight.data[0, 0] = torch.nan
        before = str(model)

        with pytest.raises(ValueError, match=r"The weight of 6 must be finite to be factorized"):
            cf.apply_factorization(model, **SMALL)

        assert str(model) == before
        assert cf.apply_factorization(model, **SMALL, factorize_linears=False)

    @pytest.mark.parametrize("layer", [nn.Linear(24, 24), nn.Conv2d(24, 24, 3)])
    def test_a_layer_alone_is_refused(self, layer: nn.Module):
        """The root cannot be replaced; the message says what to do."""
        with pytest.raises(ValueError, match=r"that is one itself\. Wrap it"):
            cf.apply_factorization(layer, **SMALL)

    @pytest.mark.parametrize("name", ["min_channels", "min_features"])
    @pytest.mark.parametrize("minimum", [0, -1])
    def test_bad_minimum_is_refused(self, name: str, minimum: float):
        """The message names which."""
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got"):
            cf.apply_factorization(nn.Sequential(), **{name: minimum})

    @pytest.mark.parametrize("name", ["latent_channels", "latent_features"])
    @pytest.mark.parametrize("latent", [0, 1.0, float("nan")])
    def test_bad_width_is_refused(self, name: str, latent: float):
        """The message names which."""
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, or a fraction"):
            cf.apply_factorization(nn.Sequential(), **{name: latent})

    def test_what_is_no_model_is_refused(self):
        """Only modules have layers."""
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
        """The strided convolution of the two is blurred: the same as if the one had been."""
        model = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2, padding=1)).double()
        images = torch.randn(2, 16, 9, 9, dtype=torch.float64)
        cf.apply_factorization(model, min_channels=16)
        one = nn.Conv2d(16, 16, 3, stride=2, padding=1).double()
        one.weight.data, one.bias.data = model[0].weight.data, model[0].bias.data

        report = cf.apply_blurpool(model)

        assert [entry.paths for entry in report] == [("0.first",)]
        torch.testing.assert_close(model(images), cf.BlurConv2d(one).double()(images))

    def test_standardised_weights_are_left_alone(self):
        """Two factors would not be the standardised weight; the other way round both are standardised."""
        model = nn.Sequential(nn.Conv2d(16, 16, 3))
        cf.apply_weight_standardization(model)

        assert not cf.apply_factorization(model, min_channels=16)

        model = nn.Sequential(nn.Conv2d(16, 16, 3))
        cf.apply_factorization(model, min_channels=16)

        assert [entry.paths for entry in cf.apply_weight_standardization(model)] == [("0.first",), ("0.second",)]

"""Squeeze-and-excitation applied to models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from composer import functional as cf
from fixtures.models import ResidualBlock


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        ResidualBlock(),
        nn.ConvTranspose2d(24, 24, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


class TestApplySqueezeExcite:
    @pytest.mark.parametrize(
        ("arguments", "paths"),
        [
            ({"min_channels": 16}, ["2.conv", "2.shortcut"]),
            ({"min_channels": 3}, ["0", "2.conv", "2.shortcut"]),
            ({"min_channels": 17}, []),
            ({}, []),
        ],
    )
    def test_arguments_select_layers(self, arguments: dict[str, int], paths: list[str]):
        """Convolutions with enough channels on both sides are wrapped; transposed ones and linear layers are not."""
        report = cf.apply_squeeze_excite(_network(), **arguments)

        assert [path for entry in report for path in entry.paths] == paths
        assert {entry.new for entry in report} <= {"SqueezeExciteConv2d"}

    @pytest.mark.parametrize(("latent", "width"), [(8, 8), (0.25, 6)])
    def test_width(self, latent: float, width: int):
        """A number of channels, or a fraction of the convolution's outputs."""
        model = _network()

        cf.apply_squeeze_excite(model, latent_channels=latent, min_channels=16)

        assert model[2].conv.se.reduce.weight.shape == (width, 24)

    def test_outputs_equal_torchvision(self):
        """The output equals the convolution followed by torchvision's layer with the same weights."""
        from torchvision.ops import SqueezeExcitation

        conv = nn.Conv2d(4, 8, 3)
        model, images = nn.Sequential(conv), torch.rand(2, 4, 6, 6)
        expected = SqueezeExcitation(8, 3)

        cf.apply_squeeze_excite(model, latent_channels=3, min_channels=4)
        for convolution, linear in ((expected.fc1, model[0].se.reduce), (expected.fc2, model[0].se.expand)):
            convolution.weight.data = linear.weight.data[:, :, None, None]
            convolution.bias.data.zero_()

        assert model[0].conv is conv
        torch.testing.assert_close(model(images), expected(conv(images)))

    def test_is_idempotent(self):
        """Wrapped convolutions are not wrapped again, for any min_channels."""
        model = _network()
        cf.apply_squeeze_excite(model, min_channels=16)
        before = str(model)

        assert not cf.apply_squeeze_excite(model, min_channels=16)
        assert not cf.apply_squeeze_excite(model[2].conv, min_channels=1)
        assert str(model) == before

    @pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.AdamW])
    def test_optimizer_updates_all_parameters(self, make):
        """One step of an existing optimizer updates all parameters, and old ones keep their state."""
        model = _network()
        optimizer = make(model.parameters())
        model(torch.rand(4, 3, 16, 16)).square().sum().backward()
        optimizer.step()
        state = {parameter: optimizer.state[parameter] for parameter in model.parameters()}

        cf.apply_squeeze_excite(model, 4, 16, optimizers=optimizer)
        before = copy.deepcopy(list(model.parameters()))
        optimizer.zero_grad()
        model(torch.rand(4, 3, 16, 16)).square().sum().backward()
        optimizer.step()

        assert not any(torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
        assert all(optimizer.state[parameter] is old for parameter, old in state.items())
        assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}

    def test_named_parameters_of_an_optimizer_are_renamed(self):
        """An optimizer with names has those of the changed model."""
        model = _network()
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)

        cf.apply_squeeze_excite(model, 4, 16, optimizers=optimizer)

        in_optimizer = dict(
            zip(optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["params"], strict=True)
        )
        assert in_optimizer == dict(model.named_parameters())

    def test_hooks_of_a_convolution_are_preserved(self):
        """A hook on the convolution receives its own output."""
        model = _network()
        called: list[nn.Module] = []
        conv = model[2].conv
        conv.register_forward_hook(lambda module, args, output: called.append(module))

        cf.apply_squeeze_excite(model, 4, 16)
        model(torch.rand(2, 3, 16, 16))

        assert called == [conv]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_dtype_device_mode_and_requires_grad_are_preserved(self, dtype: torch.dtype, device: torch.device):
        """New layers match their convolution."""
        model = _network().to(device=device, dtype=dtype).eval()
        model[2].conv.requires_grad_(False)

        cf.apply_squeeze_excite(model, 4, 16)

        assert model(torch.rand(2, 3, 16, 16, device=device, dtype=dtype)).dtype == dtype
        assert not any(module.training for module in model.modules())
        assert not any(parameter.requires_grad for parameter in model[2].conv.parameters())
        assert all(parameter.requires_grad for parameter in model[2].shortcut.parameters())

    def test_shared_convolutions_stay_shared(self):
        """A convolution used twice becomes one layer used twice."""
        conv = nn.Conv2d(8, 8, 3)
        model = nn.Sequential(conv, nn.ReLU(), conv)

        report = cf.apply_squeeze_excite(model, 4, 8)

        assert model[0] is model[2]
        assert [entry.paths for entry in report] == [("0", "2")]

    def test_parametrized_convolutions_are_wrapped(self):
        """A convolution with a parametrized weight is wrapped; a lazy one is not."""
        conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3))
        model = nn.Sequential(conv, nn.LazyConv2d(8, 3))

        report = cf.apply_squeeze_excite(model, 4, 1)

        assert [entry.paths for entry in report] == [("0",)]
        assert model[0].conv is conv

    def test_exports(self):
        """The model can be exported."""
        model = _network().eval()
        cf.apply_squeeze_excite(model, 4, 16)
        images = torch.rand(2, 3, 16, 16)

        exported = torch.export.export(model, (images,)).module()

        torch.testing.assert_close(exported(images), model(images))

    @pytest.mark.parametrize(
        "layer",
        [nn.Conv2d(16, 16, 3), cf.BlurConv2d(16, 16, 3, stride=2), cf.FactorizedConv2d(16, 16, 3)],
    )
    def test_root_layer_raises(self, layer: nn.Module):
        """The root cannot be replaced; the error states the remedy."""
        with pytest.raises(ValueError, match=r"2d that is one itself\. Wrap it"):
            cf.apply_squeeze_excite(layer, 4, 16)

    def test_bad_min_channels_raises(self):
        """The minimum is at least 0, with which all convolutions are wrapped."""
        with pytest.raises(ValueError, match="min_channels must be at least 0, got -1"):
            cf.apply_squeeze_excite(_network(), min_channels=-1)

        assert cf.apply_squeeze_excite(nn.Sequential(nn.Conv2d(1, 1, 3)), latent_channels=1, min_channels=0)

    def test_bad_width_raises(self):
        """An invalid width raises, also if no convolution would be wrapped."""
        with pytest.raises(ValueError, match="latent_channels must be a whole number of at least 1, or a fraction"):
            cf.apply_squeeze_excite(nn.Sequential(), latent_channels=0)

    def test_non_module_raises(self):
        """Only modules are supported."""
        with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got list"):
            cf.apply_squeeze_excite([nn.Conv2d(16, 16, 3)])


OTHERS = {
    "blurpool": cf.apply_blurpool,
    "blurpool, paper's order": lambda model: cf.apply_blurpool(model, blur_first=False),
    "factorization": lambda model: cf.apply_factorization(model, min_channels=16, latent_channels=2),
    "weight standardization": cf.apply_weight_standardization,
}


class TestWithOtherSurgery:
    @pytest.mark.parametrize("name", OTHERS)
    def test_order_does_not_matter(self, name: str):
        """In both orders the model has the same layers and outputs."""
        first, images = _network().double(), torch.rand(2, 3, 16, 16, dtype=torch.float64)
        second = copy.deepcopy(first)

        cf.apply_squeeze_excite(first, 4, 16)
        OTHERS[name](first)
        OTHERS[name](second)
        report = cf.apply_squeeze_excite(second, 4, 16)

        assert [entry.paths for entry in report] == [("2.conv",), ("2.shortcut",)]
        assert str(first) == str(second)
        second.load_state_dict(first.state_dict())
        assert torch.equal(first(images), second(images))

    @pytest.mark.parametrize("name", OTHERS)
    def test_other_surgery_is_inside(self, name: str):
        """The complete output of the other surgery's layer is weighted."""
        model, images = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2)), torch.rand(2, 16, 9, 9)
        OTHERS[name](model)
        other = model[0]

        cf.apply_squeeze_excite(model, 4, 16)

        assert model[0].conv is other
        assert torch.equal(model(images), model[0].se(other(images)))

    def test_small_layers_are_unchanged(self):
        """A blurred or factorized convolution with few channels is not wrapped, nor are its parts."""
        factorized = cf.FactorizedConv2d(16, 8, 3, latent_channels=12)
        model = nn.Sequential(cf.BlurConv2d(8, 16, 3, stride=2), factorized)

        assert not cf.apply_squeeze_excite(model, 4, 9)

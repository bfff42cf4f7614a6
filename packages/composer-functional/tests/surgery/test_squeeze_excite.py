"""Squeeze-and-excitation applied to models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from composer import functional as cf


class Block(nn.Module):
    """A small residual block with a strided way and a strided shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.shortcut = nn.Conv2d(16, 24, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(24)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(images)) + self.shortcut(images)


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        Block(),
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
    def test_arguments_choose(self, arguments: dict[str, int], paths: list[str]):
        """Convolutions with enough channels on both sides get a layer; transposed ones and linear layers do not."""
        report = cf.apply_squeeze_excite(_network(), **arguments)

        assert [path for entry in report for path in entry.paths] == paths
        assert {entry.new for entry in report} <= {"SqueezeExciteConv2d"}

    @pytest.mark.parametrize(("latent", "width"), [(8, 8), (0.25, 6)])
    def test_width(self, latent: float, width: int):
        """A number of channels, or a fraction of the convolution's outputs."""
        model = _network()

        cf.apply_squeeze_excite(model, latent_channels=latent, min_channels=16)

        assert model[2].conv.se.reduce.weight.shape == (width, 24)

    def test_outputs_are_weighed(self):
        """Behind the same convolution comes torchvision's layer with the same weights."""
        from torchvision.ops import SqueezeExcitation

        conv = nn.Conv2d(4, 8, 3)
        model, images = nn.Sequential(conv), torch.rand(2, 4, 6, 6)
        theirs = SqueezeExcitation(8, 3)

        cf.apply_squeeze_excite(model, latent_channels=3, min_channels=4)
        for convolution, linear in ((theirs.fc1, model[0].se.reduce), (theirs.fc2, model[0].se.expand)):
            convolution.weight.data = linear.weight.data[:, :, None, None]
            convolution.bias.data.zero_()

        assert model[0].conv is conv
        torch.testing.assert_close(model(images), theirs(conv(images)))

    def test_second_time_changes_nothing(self):
        """What has a layer gets no second, however small the others' channels are."""
        model = _network()
        cf.apply_squeeze_excite(model, min_channels=16)
        before = str(model)

        assert not cf.apply_squeeze_excite(model, min_channels=16)
        assert not cf.apply_squeeze_excite(model[2].conv, min_channels=1)
        assert str(model) == before

    @pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.AdamW])
    def test_every_parameter_moves_after_surgery(self, make):
        """One step with the optimizer made before moves all, and old parameters keep their state."""
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
        """An optimizer that knows names has those of the model after surgery."""
        model = _network()
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)

        cf.apply_squeeze_excite(model, 4, 16, optimizers=optimizer)

        held = dict(zip(optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["params"], strict=True))
        assert held == dict(model.named_parameters())

    def test_hooks_of_a_convolution_stay_with_it(self):
        """A hook on the convolution sees what comes before the layer."""
        model = _network()
        seen: list[nn.Module] = []
        conv = model[2].conv
        conv.register_forward_hook(lambda module, args, output: seen.append(module))

        cf.apply_squeeze_excite(model, 4, 16)
        model(torch.rand(2, 3, 16, 16))

        assert seen == [conv]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_dtype_device_mode_and_freezing_are_kept(self, dtype: torch.dtype, device: torch.device):
        """New layers are as their convolution is."""
        model = _network().to(device=device, dtype=dtype).eval()
        model[2].conv.requires_grad_(False)

        cf.apply_squeeze_excite(model, 4, 16)

        assert model(torch.rand(2, 3, 16, 16, device=device, dtype=dtype)).dtype == dtype
        assert not any(module.training for module in model.modules())
        assert not any(parameter.requires_grad for parameter in model[2].conv.parameters())
        assert all(parameter.requires_grad for parameter in model[2].shortcut.parameters())

    def test_a_shared_convolution_stays_shared(self):
        """One convolution in two places becomes one layer in two places."""
        conv = nn.Conv2d(8, 8, 3)
        model = nn.Sequential(conv, nn.ReLU(), conv)

        report = cf.apply_squeeze_excite(model, 4, 8)

        assert model[0] is model[2]
        assert [entry.paths for entry in report] == [("0", "2")]

    def test_subclasses_are_convolutions(self):
        """A convolution with a parametrized weight gets a layer like any other; a lazy one is left alone."""
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
        [nn.Conv2d(16, 16, 3), cf.BlurConv2d(nn.Conv2d(16, 16, 3, stride=2)), cf.FactorizedConv2d(16, 16, 3)],
    )
    def test_a_layer_alone_is_refused(self, layer: nn.Module):
        """The root cannot be replaced; the message says what to do."""
        with pytest.raises(ValueError, match=r"2d that is one itself\. Wrap it"):
            cf.apply_squeeze_excite(layer, 4, 16)

    @pytest.mark.parametrize("minimum", [0, -1])
    def test_bad_min_channels_is_refused(self, minimum: float):
        """Every convolution has a channel."""
        with pytest.raises(ValueError, match="min_channels must be at least 1, got"):
            cf.apply_squeeze_excite(_network(), min_channels=minimum)

    def test_bad_width_is_refused_before_anything_changes(self):
        """Even if no convolution would get a layer."""
        with pytest.raises(ValueError, match="latent_channels must be a whole number of at least 1, or a fraction"):
            cf.apply_squeeze_excite(nn.Sequential(), latent_channels=0)

    def test_what_is_no_model_is_refused(self):
        """Only modules have layers."""
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
        """Whichever comes first, the model has the same layers, and computes the same with the same weights."""
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
    def test_the_other_is_inside(self, name: str):
        """What is weighed is the whole output of the other surgery's layer."""
        model, images = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2)), torch.rand(2, 16, 9, 9)
        OTHERS[name](model)
        other = model[0]

        cf.apply_squeeze_excite(model, 4, 16)

        assert model[0].conv is other
        assert torch.equal(model(images), model[0].se(other(images)))

    def test_small_ones_are_left_as_a_whole(self):
        """A blurred or factorized convolution with few channels gets no layer, inside neither."""
        factorized = cf.FactorizedConv2d(16, 8, 3, latent_channels=12)
        model = nn.Sequential(cf.BlurConv2d(nn.Conv2d(8, 16, 3, stride=2)), factorized)

        assert not cf.apply_squeeze_excite(model, 4, 9)

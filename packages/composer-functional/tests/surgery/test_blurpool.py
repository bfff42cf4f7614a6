"""BlurPool applied to models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from composer import functional as cf
from fixtures.models import ResidualBlock


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
        ResidualBlock(),
        nn.Conv2d(24, 24, 3, padding=1),
        nn.MaxPool2d(3, stride=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


class TestApplyBlurpool:
    def test_replaces_strided_layers(self):
        """Strided poolings, and strided convolutions with enough channels, are replaced."""
        model = _network()

        report = cf.apply_blurpool(model)

        assert [(entry.paths, entry.new) for entry in report] == [
            (("1",), "BlurMaxPool2d"),
            (("2.conv",), "BlurConv2d"),
            (("2.shortcut",), "BlurConv2d"),
        ]
        assert type(model[0]) is type(model[3]) is nn.Conv2d
        assert type(model[4]) is nn.MaxPool2d

    @pytest.mark.parametrize(
        ("arguments", "paths"),
        [
            ({"replace_convs": False}, ["1"]),
            ({"replace_maxpools": False}, ["2.conv", "2.shortcut"]),
            ({"min_channels": 3}, ["0", "1", "2.conv", "2.shortcut"]),
            ({"min_channels": 17}, ["1"]),
            ({"replace_convs": False, "replace_maxpools": False}, []),
        ],
    )
    def test_arguments_select_layers(self, arguments: dict[str, int], paths: list[str]):
        """Each argument extends or restricts what is replaced."""
        report = cf.apply_blurpool(_network(), **arguments)

        assert [path for entry in report for path in entry.paths] == paths

    @pytest.mark.parametrize("blur_first", [True, False])
    @pytest.mark.parametrize("size", [16, 21])
    def test_output_sizes_are_preserved(self, blur_first: bool, size: int):
        """Every module's output keeps its size."""
        model = _network()
        images = torch.rand(2, 3, size, size)
        shapes: list[torch.Size] = []
        for module in model:
            module.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
        model(images)
        before = shapes.copy()
        shapes.clear()

        cf.apply_blurpool(model, blur_first=blur_first)
        model(images)

        assert shapes == before

    def test_parameters_are_the_same_objects(self):
        """The blurred convolution has the weight itself, under conv."""
        model = _network()
        parameters = list(model.parameters())
        names = set(model.state_dict())

        cf.apply_blurpool(model)

        assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
        moved = {"2.conv.weight", "2.conv.bias", "2.shortcut.weight"}
        assert set(model.state_dict()) == names - moved | {
            "2.conv.conv.weight",
            "2.conv.conv.bias",
            "2.shortcut.conv.weight",
        }

    def test_named_parameters_of_an_optimizer_are_renamed(self):
        """An optimizer with names has the new ones, after any prefix."""
        model = nn.ModuleDict({"module": _network()})
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)

        cf.apply_blurpool(model["module"], optimizers=optimizer)

        assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]

    def test_hooks_of_a_convolution_are_preserved(self):
        """A hook on the convolution is called once per pass, with the convolution."""
        model = _network()
        called: list[nn.Module] = []
        conv = model[2].conv
        conv.register_forward_hook(lambda module, args, output: called.append(module))

        cf.apply_blurpool(model)
        model(torch.rand(2, 3, 16, 16))

        assert called == [conv]

    def test_poolings_with_indices_are_unchanged(self):
        """Indices of maxima have no meaning after a blur."""
        assert not cf.apply_blurpool(nn.Sequential(nn.MaxPool2d(2, return_indices=True)))

    def test_factorized_convolution_has_its_weight(self):
        """Its weight is the product, with the first factor inside a blur."""
        layer = cf.FactorizedConv2d(16, 16, 3, stride=2, latent_channels=4)
        model = nn.Sequential(layer)
        expected = layer.weight

        report = cf.apply_blurpool(model)

        assert [entry.paths for entry in report] == [("0.first",)]
        assert torch.equal(layer.weight, expected)
        assert layer.first.bias is None

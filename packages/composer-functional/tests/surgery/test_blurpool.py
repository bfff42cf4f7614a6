"""BlurPool applied to models."""

from __future__ import annotations

import copy

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

    def test_is_idempotent(self):
        """Blurred layers are not blurred again, nor are layers inside them."""
        model = _network()
        cf.apply_blurpool(model, blur_first=True)
        before = str(model)

        report = cf.apply_blurpool(model)

        assert not report
        assert str(model) == before

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

    @pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.AdamW])
    def test_optimizer_updates_all_parameters(self, make):
        """One step of an existing optimizer updates all parameters and preserves their state."""
        model = _network()
        optimizer = make(model.parameters())
        model(torch.rand(4, 3, 16, 16)).square().sum().backward()
        optimizer.step()
        state = {id(parameter): optimizer.state[parameter] for parameter in model.parameters()}
        before = copy.deepcopy(list(model.parameters()))

        cf.apply_blurpool(model, optimizers=optimizer)
        optimizer.zero_grad()
        model(torch.rand(4, 3, 16, 16)).square().sum().backward()
        optimizer.step()

        assert not any(torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
        assert all(optimizer.state[parameter] is state[id(parameter)] for parameter in model.parameters())
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)

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

    def test_hooks_of_a_pooling_are_moved(self):
        """A hook on the pooling is called with its replacement, and its handle removes it."""
        model = _network()
        called: list[nn.Module] = []
        handle = model[1].register_forward_hook(lambda module, args, output: called.append(module))

        cf.apply_blurpool(model)
        model(torch.rand(2, 3, 16, 16))
        handle.remove()
        model(torch.rand(2, 3, 16, 16))

        assert called == [model[1]]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_dtype_device_and_mode_are_preserved(self, dtype: torch.dtype, device: torch.device):
        """The blurred model has the plain one's dtype, device and mode."""
        model = _network().to(device=device, dtype=dtype).eval()

        cf.apply_blurpool(model)

        assert model(torch.rand(2, 3, 16, 16, device=device, dtype=dtype)).dtype == dtype
        assert not any(module.training for module in model.modules())
        assert {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()} == {dtype}

    def test_poolings_with_indices_are_unchanged(self):
        """Indices of maxima have no meaning after a blur."""
        assert not cf.apply_blurpool(nn.Sequential(nn.MaxPool2d(2, return_indices=True)))

    def test_shared_layers_stay_shared(self):
        """A pooling used twice becomes one blurred pooling used twice."""
        pool = nn.MaxPool2d(2)
        model = nn.Sequential(pool, nn.ReLU(), pool)

        report = cf.apply_blurpool(model)

        assert model[0] is model[2]
        assert [entry.paths for entry in report] == [("0", "2")]

    def test_works_with_weight_normalisation(self):
        """A convolution with a parametrized weight is blurred too."""
        conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 8, 3, stride=2))
        images = torch.rand(1, 16, 9, 9)
        model = nn.Sequential(conv)
        expected = conv(cf.BlurPool2d(stride=1)(images))

        cf.apply_blurpool(model)

        torch.testing.assert_close(model(images), expected)

    def test_untrained_parameters_are_not_added(self):
        """An optimizer of the bias only does not receive the renamed weight."""
        model = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2))
        optimizer = torch.optim.SGD([model[0].bias], lr=0.1)

        cf.apply_blurpool(model, optimizers=optimizer)

        assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == [id(model[0].conv.bias)]

    def test_other_subclasses_are_unchanged(self):
        """Timm layers with stride-dependent padding do not change."""
        from timm.layers.conv2d_same import Conv2dSame
        from timm.layers.pool2d_same import MaxPool2dSame

        model = nn.Sequential(Conv2dSame(16, 16, 3, stride=2), MaxPool2dSame(2, 2))

        assert not cf.apply_blurpool(model)

    @pytest.mark.parametrize("layer", [cf.BlurConv2d(16, 16, 3, stride=2), cf.BlurMaxPool2d(2)])
    def test_blurred_root_is_unchanged(self, layer: nn.Module):
        """The inner convolution is not blurred again."""
        before = str(layer)

        assert not cf.apply_blurpool(layer)
        assert str(layer) == before

    def test_factorized_convolution_has_its_weight(self):
        """Its weight is the product, with the first factor inside a blur."""
        layer = cf.FactorizedConv2d(16, 16, 3, stride=2, latent_channels=4)
        model = nn.Sequential(layer)
        expected = layer.weight

        report = cf.apply_blurpool(model)

        assert [entry.paths for entry in report] == [("0.first",)]
        assert torch.equal(layer.weight, expected)
        assert layer.first.bias is None

    def test_exports(self):
        """The blurred model can be exported."""
        model = _network().eval()
        cf.apply_blurpool(model)
        images = torch.rand(2, 3, 16, 16)

        exported = torch.export.export(model, (images,)).module()

        torch.testing.assert_close(exported(images), model(images))

    def test_root_layer_raises(self):
        """The root cannot be replaced and does not change; the error states the remedy."""
        conv = nn.Conv2d(16, 16, 3, stride=2)

        with pytest.raises(ValueError, match=r"got a Conv2d that is one itself\. Wrap it"):
            cf.apply_blurpool(conv, blur_first=False)

        assert conv.stride == (2, 2)

    def test_bad_min_channels_raises(self):
        """The minimum is at least 0, with which all strided convolutions are blurred."""
        with pytest.raises(ValueError, match="min_channels must be at least 0, got -1"):
            cf.apply_blurpool(_network(), min_channels=-1)

        assert cf.apply_blurpool(nn.Sequential(nn.Conv2d(1, 4, 3, stride=2)), min_channels=0)

    def test_non_module_raises(self):
        """Only modules are supported."""
        with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got list"):
            cf.apply_blurpool([nn.MaxPool2d(2)])

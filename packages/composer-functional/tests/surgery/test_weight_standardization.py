"""Weight standardization applied to models."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from composer import functional as cf


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()),
        nn.Conv2d(16, 2, 1),
    )


class TestApplyWeightStandardization:
    def test_convolutions_of_any_dimension(self):
        """Convolutions are standardized, transposed ones and linear layers are not."""
        model = nn.Sequential(
            nn.Conv1d(2, 2, 3), nn.Conv2d(2, 2, 3), nn.Conv3d(2, 2, 3), nn.ConvTranspose2d(2, 2, 3), nn.Linear(2, 2)
        )

        report = cf.apply_weight_standardization(model)

        assert [(entry.paths, entry.old, entry.new) for entry in report] == [
            (("0",), "Conv1d", "ParametrizedConv1d"),
            (("1",), "Conv2d", "ParametrizedConv2d"),
            (("2",), "Conv3d", "ParametrizedConv3d"),
        ]

    def test_equals_timm(self):
        """Outputs and gradients equal those of timm's convolutions with the same parameters."""
        from timm.layers import StdConv2d

        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3, stride=2)).double()
        expected = nn.Sequential(
            StdConv2d(3, 8, 3, padding=0, bias=True, eps=1e-10),
            nn.ReLU(),
            StdConv2d(8, 2, 3, stride=2, padding=0, bias=True, eps=1e-10),
        ).double()
        expected.load_state_dict(model.state_dict())
        images = torch.randn(2, 3, 9, 9, dtype=torch.float64)

        cf.apply_weight_standardization(model)

        torch.testing.assert_close(model(images), expected(images))
        model(images).square().sum().backward()
        expected(images).square().sum().backward()
        torch.testing.assert_close(model[0].parametrizations.weight.original.grad, expected[0].weight.grad)

    @pytest.mark.parametrize(
        ("ignored", "paths"), [(0, ["0", "2.0", "3"]), (1, ["0", "2.0"]), (2, ["0"]), (3, []), (4, [])]
    )
    def test_last_layers_are_excluded(self, ignored: int, paths: list[str]):
        """The last convolutions of the model are excluded."""
        report = cf.apply_weight_standardization(_network(), n_last_layers_ignore=ignored)

        assert [path for entry in report for path in entry.paths] == paths

    def test_is_idempotent(self):
        """Standardized convolutions are not standardized again, and still count as last ones."""
        model = _network()
        cf.apply_weight_standardization(model, 1)
        before = str(model)

        assert not cf.apply_weight_standardization(model, 1)
        assert str(model) == before
        assert [entry.paths for entry in cf.apply_weight_standardization(model)] == [("3",)]

    def test_optimizer_updates_all_parameters(self):
        """One step of an existing optimizer updates all parameters and preserves their state."""
        model = _network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.rand(4, 3, 9, 9)).square().sum().backward()
        optimizer.step()
        state = {parameter: optimizer.state[parameter] for parameter in model.parameters()}

        cf.apply_weight_standardization(model)
        before = copy.deepcopy(list(model.parameters()))
        optimizer.zero_grad()
        model(torch.rand(4, 3, 9, 9)).square().sum().backward()
        optimizer.step()

        assert not any(torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
        assert all(optimizer.state[parameter] is old for parameter, old in state.items())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_dtype_mode_hooks_and_requires_grad_are_preserved(self, dtype: torch.dtype, device: torch.device):
        """The convolution is the same module."""
        model = _network().to(device=device, dtype=dtype).eval().requires_grad_(False)
        conv, called = model[0], []
        conv.register_forward_hook(lambda module, args, output: called.append(module))

        cf.apply_weight_standardization(model)
        output = model(torch.rand(2, 3, 9, 9, device=device, dtype=dtype))

        assert output.dtype == dtype
        assert called == [conv]
        assert not any(module.training for module in model.modules())
        assert not any(parameter.requires_grad for parameter in model.parameters())

    @pytest.mark.parametrize(
        "conv",
        [
            nn.LazyConv2d(4, 3),
            nn.Conv2d(4, 4, 1, groups=4),
            nn.Conv2d(1, 4, 1),
        ],
        ids=["lazy", "depthwise 1x1", "one channel 1x1"],
    )
    def test_layers_without_filters_are_unchanged(self, conv: nn.Module):
        """Filters of one weight would become zero; a lazy convolution has none yet."""
        assert not cf.apply_weight_standardization(nn.Sequential(conv))

    def test_copies_and_state_dicts(self):
        """A copy is independent and equal; torch does not support pickling."""
        model, images = _network(), torch.rand(2, 3, 9, 9)
        cf.apply_weight_standardization(model)

        twin = copy.deepcopy(model)
        twin[0].parametrizations.weight.original.data.fill_(1)
        other = _network()
        cf.apply_weight_standardization(other)
        other.load_state_dict(model.state_dict())

        assert not torch.equal(twin(images), model(images))
        assert torch.equal(other(images), model(images))
        with pytest.raises(RuntimeError, match="only supported through state_dict"):
            pickle.dumps(model)

    def test_blurpool_before_and_after(self):
        """The convolution inside a blur is standardized, in either order."""
        first, images = _network(), torch.rand(2, 3, 9, 9)
        second = copy.deepcopy(first)

        cf.apply_blurpool(first, min_channels=8)
        report = cf.apply_weight_standardization(first)
        cf.apply_weight_standardization(second)
        cf.apply_blurpool(second, min_channels=8)

        assert [entry.paths for entry in report] == [("0",), ("2.0.conv",), ("3",)]
        assert str(first) == str(second)
        assert torch.equal(first(images), second(images))

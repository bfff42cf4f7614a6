"""Low-precision norms applied to models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from composer import functional as cf

APPLY = {"layer": cf.apply_low_precision_layernorm, "group": cf.apply_low_precision_groupnorm}
NEW = {"layer": cf.LowPrecisionLayerNorm, "group": cf.LowPrecisionGroupNorm}
KINDS = pytest.mark.parametrize("kind", ["layer", "group"])


class OtherLayerNorm(nn.LayerNorm):
    """A norm with another forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class OtherGroupNorm(nn.GroupNorm):
    """A norm with another forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


def _norm(kind: str) -> nn.Module:
    return nn.LayerNorm(8, 1e-3) if kind == "layer" else nn.GroupNorm(2, 8, 1e-3)


def _network(kind: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), _norm(kind), nn.Sequential(nn.ReLU(), _norm(kind)), nn.Linear(8, 3))


@KINDS
class TestApply:
    @pytest.mark.parametrize(
        ("precision", "dtype"),
        [
            (None, None),
            ("amp_bf16", torch.bfloat16),
            ("amp_fp16", torch.float16),
            ("amp_fp8", torch.bfloat16),
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.float16),
        ],
    )
    def test_replaces_norms_of_its_kind(self, kind: str, precision, dtype):
        """Both norms are replaced with their settings and the precision; other kinds are not."""
        model = nn.Sequential(_network(kind), _norm("group" if kind == "layer" else "layer"))

        report = APPLY[kind](model, precision)

        assert [entry.paths for entry in report] == [("0.1",), ("0.2.1",)]
        assert {entry.new for entry in report} == {NEW[kind].__name__}
        assert (model[0][1].precision, model[0][1].eps) == (dtype, 1e-3)
        assert not isinstance(model[1], tuple(NEW.values()))

    @pytest.mark.parametrize("precision", ["fp32", torch.float32])
    def test_full_precision_replaces_nothing(self, kind: str, precision):
        """Norms already compute in 32 bits."""
        model = _network(kind)

        report = APPLY[kind](model, precision)

        assert not report
        assert type(model[1]) is type(_norm(kind))

    def test_outputs_are_rounded(self, kind: str):
        """On the CPU without autocast, outputs are close but not equal."""
        model = _network(kind)
        x = torch.randn(4, 8)
        expected = model(x)

        APPLY[kind](model, "amp_bf16")
        output = model(x)

        assert output.dtype == torch.float32
        assert not torch.equal(output, expected)
        torch.testing.assert_close(output, expected, atol=0.05, rtol=0.05)

    def test_other_subclasses_are_unchanged(self, kind: str):
        """An unknown forward is not replaced."""
        other = OtherLayerNorm(8) if kind == "layer" else OtherGroupNorm(2, 8)

        assert not APPLY[kind](nn.Sequential(other))

    def test_timm_norms_are_replaced(self, kind: str):
        """Equivalent norms of timm are replaced too."""
        timm = pytest.importorskip("timm")
        norm = timm.layers.LayerNorm(8) if kind == "layer" else timm.layers.GroupNorm(8, 2)
        model = nn.Sequential(norm)
        x = torch.randn(4, 8)
        expected = norm(x.bfloat16().float())

        report = APPLY[kind](model, "amp_bf16")

        assert len(report) == 1
        torch.testing.assert_close(model(x), expected, atol=0.01, rtol=0.01)

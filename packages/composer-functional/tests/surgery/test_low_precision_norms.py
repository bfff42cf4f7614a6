"""Low-precision norms applied to models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

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
def test_instance_forward_is_unchanged(kind: str):
    """A layer with a forward set on the instance does not change."""
    norm = _norm(kind)
    norm.forward = lambda hidden: hidden

    assert not APPLY[kind](nn.Sequential(norm), "amp_bf16")


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

    def test_parameters_names_and_optimizers_are_preserved(self, kind: str):
        """Parameters are the same objects under the same names; an existing optimizer updates them."""
        model = _network(kind)
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
        parameters, names = list(model.parameters()), list(model.state_dict())
        before = [parameter.detach().clone() for parameter in parameters]

        APPLY[kind](model, None, optimizer)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()

        assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
        assert list(model.state_dict()) == names
        assert not any(torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
        assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]

    def test_is_idempotent(self, kind: str):
        """The first precision is preserved."""
        model = _network(kind)
        APPLY[kind](model, "amp_bf16")

        report = APPLY[kind](model, "amp_fp16")

        assert not report
        assert model[1].precision == torch.bfloat16

    def test_shared_norms_hooks_mode_and_dtype(self, kind: str, device: torch.device):
        """A norm used twice stays one; mode, dtype, device, requires_grad and hooks are preserved."""
        norm = _norm(kind)
        model = nn.Sequential(norm, nn.ReLU(), norm).to(device, torch.float64).eval()
        norm.weight.requires_grad_(False)
        called: list[nn.Module] = []
        norm.register_forward_hook(lambda module, args, output: called.append(module))

        report = APPLY[kind](model, "amp_bf16")
        output = model(torch.rand(2, 8, dtype=torch.float64, device=device))

        assert [entry.paths for entry in report] == [("0", "2")]
        assert model[0] is model[2]
        assert called == [model[0]] * 2
        assert not model[0].training
        assert not model[0].weight.requires_grad
        assert model[0].bias.requires_grad
        assert (output.dtype, output.device.type) == (torch.float64, device.type)

    def test_other_subclasses_are_unchanged(self, kind: str):
        """An unknown forward is not replaced."""
        other = OtherLayerNorm(8) if kind == "layer" else OtherGroupNorm(2, 8)

        assert not APPLY[kind](nn.Sequential(other))

    @pytest.mark.parametrize(
        "change", [parametrizations.weight_norm, lambda norm: prune.l1_unstructured(norm, "weight", 2)]
    )
    def test_computed_weights_are_unchanged(self, kind: str, change):
        """A parametrized or pruned norm keeps its parametrizations and hooks."""
        norm = _norm(kind)
        norm.weight = nn.Parameter(norm.weight.unsqueeze(0)) if change is parametrizations.weight_norm else norm.weight
        model = nn.Sequential(change(norm))

        report = APPLY[kind](model)

        assert not report
        assert model[0] is norm

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

    def test_meta_device(self, kind: str):
        """A model on the meta device is changed, and stays there."""
        with torch.device("meta"):
            model = _network(kind)

        APPLY[kind](model, "amp_bf16")

        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert model(torch.empty(2, 8, device="meta")).shape == (2, 3)

    @pytest.mark.parametrize("precision", ["amp_bf16", None])
    def test_exports(self, kind: str, precision: str | None):
        """The model can be exported."""
        model = _network(kind).eval()
        APPLY[kind](model, precision)
        x = torch.rand(4, 8)
        torch.compiler.reset()  # what other tests compiled counts against a limit of torch 2.7

        exported = torch.export.export(model, (x,)).module()

        torch.testing.assert_close(exported(x), model(x))

    @pytest.mark.parametrize("precision", ["bf16", "amp", torch.float64, torch.int8])
    def test_unknown_precisions_raise(self, kind: str, precision):
        """The error lists names and dtypes."""
        with pytest.raises(ValueError, match=r"precision must be torch.bfloat16.*'amp_bf16'.*None takes"):
            APPLY[kind](_network(kind), precision)

    def test_invalid_precision_raises(self, kind: str):
        """A precision is a dtype, a name or None."""
        with pytest.raises(TypeError, match=r"precision must be a torch\.dtype, a name or None, got int"):
            APPLY[kind](_network(kind), 16)

    def test_root_layer_raises(self, kind: str):
        """The root cannot be replaced."""
        with pytest.raises(ValueError, match=r"Norm that is one itself\. Wrap it"):
            APPLY[kind](_norm(kind))

    @pytest.mark.parametrize("precision", ["amp_bf16", "fp32"])
    def test_non_module_raises(self, kind: str, precision: str):
        """Only modules are supported."""
        with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got list"):
            APPLY[kind]([_norm(kind)], precision)


@pytest.mark.parametrize(("affine", "bias"), [(False, True), (True, False)])
def test_layer_norms_without_some_parameters(affine: bool, bias: bool):
    """Missing parameters stay missing."""
    model = nn.Sequential(nn.LayerNorm(8, elementwise_affine=affine, bias=bias))
    names = list(model.state_dict())

    cf.apply_low_precision_layernorm(model, "amp_bf16")

    assert list(model.state_dict()) == names
    assert model(torch.rand(2, 8)).shape == (2, 8)


def test_group_norms_without_parameters():
    """A group norm without parameters is supported."""
    model = nn.Sequential(nn.GroupNorm(2, 8, affine=False))

    assert cf.apply_low_precision_groupnorm(model, "amp_bf16")
    assert not list(model.parameters())
    assert model(torch.rand(2, 8)).shape == (2, 8)

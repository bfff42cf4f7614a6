"""Norms written in Python are replaced by torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm

from composer import functional as cf


class Weighted(nn.Module):
    """Common parameters of all norms here."""

    def __init__(self, features: int = 8, eps: float = 1e-6, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features)) if bias else None
        self.epsilon = eps

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x if self.bias is None else self.weight * x + self.bias


class WrittenOutLayerNorm(Weighted):
    """Layer normalisation by mean and variance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = x.var(-1, keepdim=True, unbiased=False)
        return self.scale((x - mean) / (variance + self.epsilon).sqrt())


class WrittenOutRMSNorm(Weighted):
    """Normalisation by the root of the mean square."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale((x.float() * (x.float().square().mean(-1, keepdim=True) + self.epsilon).rsqrt()).to(x.dtype))


class ShiftedWeight(WrittenOutRMSNorm):
    """Scales by 1 + weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()


class Unbiased(Weighted):
    """Divides by n - 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale((x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + self.epsilon).sqrt())


class EpsilonOutside(Weighted):
    """Adds epsilon to the square root."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(
            (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False).sqrt() + self.epsilon)
        )


class OverPositions(Weighted):
    """Computes the statistics over positions too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dims = tuple(range(1, x.ndim))
        return self.scale(
            (x - x.mean(dims, keepdim=True)) / (x.var(dims, keepdim=True, unbiased=False) + self.epsilon).sqrt()
        )


class ImagesOtherwise(WrittenOutLayerNorm):
    """Normalizes dimension 1 of images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, -1)).transpose(1, -1) if x.ndim == 4 else super().forward(x)


class Gated(WrittenOutRMSNorm):
    """Has a second input."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


class TrainingOnly(WrittenOutRMSNorm):
    """Does nothing in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else self.weight * x


class EvaluationOnly(WrittenOutRMSNorm):
    """Does nothing in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x if self.training else super().forward(x)


class WithBuffer(WrittenOutRMSNorm):
    """Has an additional buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))


class WithChild(WrittenOutRMSNorm):
    """Has a child module."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Identity()


class Matrix(WrittenOutRMSNorm):
    """Has a two-dimensional weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 8))


class Gamma(nn.Module):
    """Has another name for its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gamma * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class FullPrecision(WrittenOutRMSNorm):
    """Returns float32 for any input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()) * self.weight.float() / self.weight.float()


class Detached(WrittenOutLayerNorm):
    """Has correct outputs and other gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True).detach()
        return self.scale((x - mean) / (x.var(-1, keepdim=True, unbiased=False) + self.epsilon).sqrt())


class Fused(Weighted):
    """Calls torch's kernel itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x.float(), self.weight.shape, self.weight.float(), None, self.epsilon).to(x.dtype)


class Scaling(Weighted):
    """Is not a norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


class Raising(Weighted):
    """Raises for unknown input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("x")


class Drawing(WrittenOutRMSNorm):
    """Draws in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(())


class Own(torch.autograd.Function):
    """A custom kernel."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class OwnKernel(WrittenOutRMSNorm):
    """Uses a kernel of another library."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Own.apply(super().forward(x))


def _randomized(norm: nn.Module) -> nn.Module:
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


class TestApplyFusedLayernorm:
    @pytest.mark.parametrize("features", [3, 8, 300])
    @pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-6, 1e-8, 1e-12])
    @pytest.mark.parametrize(
        ("norm", "bias", "new"),
        [
            (WrittenOutLayerNorm, True, nn.LayerNorm),
            (WrittenOutLayerNorm, False, nn.LayerNorm),
            (WrittenOutRMSNorm, False, nn.RMSNorm),
        ],
    )
    def test_replaces_written_out_norms(self, norm, bias: bool, new: type[nn.Module], eps: float, features: int):
        """The kind and epsilon are detected, and outputs agree within rounding."""
        old = _randomized(norm(features, eps, bias))
        model = nn.Sequential(nn.Identity(), old)
        x = (torch.randn(4, 5, features) + 0.1) * 10.0 ** -torch.arange(4.0)[:, None, None]

        report = cf.apply_fused_layernorm(model)

        assert [(entry.paths, entry.new) for entry in report] == [(("1",), new.__name__)]
        assert type(model[1]) is new
        assert model[1].eps == eps
        torch.testing.assert_close(model(x), old(x), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        "module",
        [
            ShiftedWeight(),
            Unbiased(),
            EpsilonOutside(eps=1e-3),
            OverPositions(),
            ImagesOtherwise(),
            Gated(),
            TrainingOnly(),
            EvaluationOnly(),
            WithBuffer(),
            WithChild(),
            Matrix(),
            Gamma(),
            FullPrecision(),
            Detached(),
            Fused(),
            Scaling(),
            Raising(),
            Drawing(),
            OwnKernel(),
            WrittenOutRMSNorm(bias=True),
            WrittenOutRMSNorm(features=2),
            nn.LayerNorm(8),
            nn.GroupNorm(2, 8),
        ],
        ids=lambda module: type(module).__name__,
    )
    def test_other_layers_are_unchanged(self, module: nn.Module):
        """Layers that differ, or are fused already, do not change."""
        model = nn.Sequential(module)

        assert not cf.apply_fused_layernorm(model)
        assert model[0] is module

    @pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, 1e-12])
    def test_hard_coded_epsilon_is_detected(self, eps: float):
        """A common epsilon in the code is detected by trial."""
        model = nn.Sequential(type("Coded", (WrittenOutRMSNorm,), {"epsilon": eps, "__module__": __name__})())
        del model[0].epsilon

        report = cf.apply_fused_layernorm(model)

        assert len(report) == 1
        assert model[0].eps == eps

    @pytest.mark.parametrize(
        ("module", "name", "new"),
        [
            ("t5", "T5LayerNorm", "RMSNorm"),
            ("llama", "LlamaRMSNorm", "RMSNorm"),
            ("cohere", "CohereLayerNorm", "LayerNorm"),
            ("deberta", "DebertaLayerNorm", "LayerNorm"),
            ("gemma", "GemmaRMSNorm", None),
            ("olmo", "OlmoLayerNorm", None),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_norms_of_transformers(self, module: str, name: str, new: str | None, dtype: torch.dtype):
        """Norms of language models are replaced if equal, with outputs within rounding."""
        modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
        old = _randomized(getattr(modeling, name)(64)).to(dtype)
        model = nn.Sequential(old)
        x = torch.randn(4, 5, 64, dtype=dtype)

        report = cf.apply_fused_layernorm(model)

        assert [entry.new for entry in report] == [new] * bool(new)
        assert model(x).dtype == old(x).dtype
        rounding = 1e-5 if dtype == torch.float32 else 2**-6
        torch.testing.assert_close(model(x), old(x), rtol=rounding, atol=rounding)

    def test_llama_continues_training(self):
        """All norms of a Llama are replaced, its logits agree, and an existing optimizer updates all parameters."""
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, use_cache=False, **sizes))
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        tokens, names = torch.arange(12).view(2, 6), list(model.state_dict())
        expected = model(tokens).logits
        before = copy.deepcopy(list(model.parameters()))

        report = cf.apply_fused_layernorm(model, optimizer)
        logits = model(tokens).logits
        logits.square().sum().backward()
        optimizer.step()

        assert len(report) == 5
        torch.testing.assert_close(logits, expected)
        assert list(model.state_dict()) == names
        assert not any(torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
        assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]

    def test_models_with_torch_norms_are_unchanged(self):
        """GPT-2, BERT, a vision transformer and a ResNet have no written-out norms."""
        import torchvision
        from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

        small = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
        models = [
            GPT2Model(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32)),
            BertModel(BertConfig(intermediate_size=16, **small)),
            torchvision.models.VisionTransformer(32, 16, 1, 2, 16, 32),
            torchvision.models.resnet18(),
        ]

        assert not any(cf.apply_fused_layernorm(model) for model in models)

    def test_layer_properties_are_preserved(self, device: torch.device):
        """Parameters, dtype, device, requires_grad, mode, hooks, sharing and global generators do not change."""
        norm = WrittenOutLayerNorm(bias=True).to(device, torch.bfloat16)
        norm.bias.requires_grad_(False)
        model = nn.Sequential(norm, nn.ReLU(), norm).eval()
        parameters = list(model.parameters())
        called: list[nn.Module] = []
        norm.register_forward_hook(lambda module, args, output: called.append(module))
        state = torch.get_rng_state()

        report = cf.apply_fused_layernorm(model)

        assert torch.equal(torch.get_rng_state(), state)
        assert not called
        model(torch.rand(2, 8, dtype=torch.bfloat16, device=device))
        assert called == [model[0]] * 2
        assert [entry.paths for entry in report] == [("0", "2")]
        assert model[0] is model[2]
        assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
        assert [parameter.requires_grad for parameter in model.parameters()] == [True, False]
        assert not model[0].training

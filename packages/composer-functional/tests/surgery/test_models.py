"""Every surgery on real architectures: all parameters are trained, and the models can be exported."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch import nn

from composer import functional as cf


def _arguments_of(name):
    return inspect.signature(getattr(cf, name)).parameters


def make_resnet(block, norm=None):
    """A torchvision ResNet for 10 classes, with two blocks in the first stage and one in each other."""
    from torchvision.models import resnet

    model = resnet.ResNet(getattr(resnet, block), [2, 1, 1, 1], num_classes=10, norm_layer=norm)
    return model, {"x": torch.randn(4, 3, 64, 64)}


def make_vit():
    """A vision transformer of two layers."""
    from torchvision.models import VisionTransformer

    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64, "num_classes": 10}
    return VisionTransformer(image_size=32, patch_size=8, dropout=0.1, **sizes), {"x": torch.randn(4, 3, 32, 32)}


def make_gpt2():
    """GPT-2 of two layers with a language modeling head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=32, vocab_size=64, use_cache=False)
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(64, (4, 16))}


def make_bert():
    """BERT of two layers, with a classifier."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
    config = BertConfig(**sizes, max_position_embeddings=32, vocab_size=64, num_labels=3)
    return BertForSequenceClassification(config), {"input_ids": torch.randint(64, (4, 16))}


def group_norm(channels):
    """A norm for building a ResNet."""
    return nn.GroupNorm(8, channels)


MODELS = {
    "resnet": functools.partial(make_resnet, "BasicBlock"),
    "resnet of bottlenecks": functools.partial(make_resnet, "Bottleneck"),
    "resnet with group norms": functools.partial(make_resnet, "BasicBlock", group_norm),
    "vit": make_vit,
    "gpt2": make_gpt2,
    "bert": make_bert,
}
RESNETS = ("resnet", "resnet of bottlenecks")
TRANSFORMERS = ("vit", "gpt2", "bert")
SMALL = {"min_channels": 16, "min_features": 16, "latent_features": 0.25}
SURGERIES = {
    "blurpool": (cf.apply_blurpool, RESNETS),
    "squeeze_excite": (cf.apply_squeeze_excite, RESNETS),
    "factorization": (functools.partial(cf.apply_factorization, **SMALL), (*RESNETS, "vit", "bert")),
    "ghost_batchnorm": (functools.partial(cf.apply_ghost_batchnorm, ghost_batch_size=2), RESNETS),
    "stochastic_depth": (
        functools.partial(cf.apply_stochastic_depth, target_layer_name="ResNetBottleneck", stochastic_method="sample"),
        ("resnet of bottlenecks",),
    ),
    "gyro_dropout": (
        functools.partial(cf.apply_gyro_dropout, iters_per_epoch=4, max_epoch=2, p=0.1, sigma=4, tau=2),
        TRANSFORMERS,
    ),
    "weight_standardization": (cf.apply_weight_standardization, RESNETS),
    "channels_last": (cf.apply_channels_last, RESNETS),
    "alibi": (functools.partial(cf.apply_alibi, max_sequence_length=64), ("gpt2", "bert")),
    "gated_attention": (cf.apply_gated_attention, ("gpt2",)),
    "qk_norm": (cf.apply_qk_norm, ("gpt2",)),
    "value_residual": (cf.apply_value_residual, ("gpt2",)),
    "gated_linear_units": (cf.apply_gated_linear_units, ("gpt2", "bert")),
    "low_precision_layernorm": (
        functools.partial(cf.apply_low_precision_layernorm, precision=torch.bfloat16),
        TRANSFORMERS,
    ),
    "low_precision_groupnorm": (
        functools.partial(cf.apply_low_precision_groupnorm, precision=torch.bfloat16),
        ("resnet with group norms",),
    ),
}
PAIRS = [(surgery, model) for surgery, (_, models) in SURGERIES.items() for model in models]
TELLS_OPTIMIZERS = sorted(
    set(SURGERIES) - {"weight_standardization", "channels_last", "gyro_dropout", "stochastic_depth"}
)


def output_of(model, inputs):
    """Return the logits."""
    outputs = model(**inputs)
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def randomize(model):
    """Replace zero parameters, which a step might not change."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def can_be_exported(model, inputs):
    """Return whether a model can be exported."""
    try:
        torch.export.export(model, (), inputs)
    except Exception:  # noqa: BLE001  (whatever it is, surgery is not the reason)
        return False
    return True


def run_in_evaluation(model, inputs):
    """Update the batch norms with these inputs; default statistics do not match standardized weights."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(**inputs)


@pytest.mark.parametrize(("surgery", "name"), PAIRS)
class TestEverySurgery:
    """Properties of each surgery, on each model that it changes."""

    def test_optimizer_updates_all_parameters(self, surgery, name):
        """An existing optimizer has and updates every parameter of the changed model."""
        (model, inputs), (apply, _) = MODELS[name](), SURGERIES[surgery]
        randomize(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

        report = apply(model, optimizers=optimizer) if surgery in TELLS_OPTIMIZERS else apply(model)
        before = {path: parameter.detach().clone() for path, parameter in model.named_parameters()}
        output_of(model.train(), inputs).float().square().mean().backward()
        optimizer.step()

        in_optimizer = {id(each) for group in optimizer.param_groups for each in group["params"]}
        assert report
        assert [path for path, each in model.named_parameters() if torch.equal(each, before[path])] == []
        assert in_optimizer == {id(each) for each in model.parameters()}

    def test_second_call_changes_nothing(self, surgery, name):
        """A second call finds nothing or raises; the model does not change."""
        (model, _), (apply, _) = MODELS[name](), SURGERIES[surgery]
        apply(model)
        modules = [type(each) for each in model.modules()]

        message, report = "", None
        try:
            report = apply(model)
        except ValueError as error:
            message = str(error)

        assert not report
        assert report is not None or len(message) > 40
        assert [type(each) for each in model.modules()] == modules

    # torch 2.7 says so of constants in a model of Transformers, with or without surgery.
    @pytest.mark.filterwarnings("ignore:.*get_attr:UserWarning")
    def test_exported_model_agrees(self, surgery, name):
        """The changed model can be exported, with equal outputs."""
        (model, inputs), (apply, _) = MODELS[name](), SURGERIES[surgery]
        apply(model)
        run_in_evaluation(model, inputs)
        model.eval()

        try:
            exported = torch.export.export(model, (), inputs).module()
        except Exception:
            plain, plain_inputs = MODELS[name]()
            if can_be_exported(plain.eval(), plain_inputs):
                raise
            pytest.skip("these versions cannot export the model as it is, before any surgery")

        with torch.no_grad():
            torch.testing.assert_close(output_of(exported, inputs), output_of(model, inputs), atol=1e-5, rtol=1e-4)

    def test_frozen_models_stay_frozen(self, surgery, name):
        """Frozen parameters stay frozen, and new ones have the model's dtype and mode."""
        (model, _), (apply, _) = MODELS[name](), SURGERIES[surgery]
        model.double().requires_grad_(False).eval()

        apply(model)

        assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert not any(module.training for module in model.modules())


def test_no_match_gives_an_empty_report():
    """The report is falsy, and modules are the same objects."""
    model = nn.Sequential(nn.Embedding(4, 4), nn.Identity())
    modules = list(model.modules())
    unfitting = {
        "alibi",
        "gated_linear_units",
        "gated_attention",
        "qk_norm",
        "value_residual",
    }  # they raise an error for unknown architectures

    reports = [apply(model) for surgery, (apply, _) in SURGERIES.items() if surgery not in unfitting]

    assert not any(reports)
    assert list(model.modules()) == modules


FITTING = {
    "apply_alibi": (make_gpt2, (64,)),
    "apply_factorization": (make_vit, ()),
    "apply_gated_attention": (make_gpt2, ()),
    "apply_qk_norm": (make_gpt2, ()),
    "apply_value_residual": (make_gpt2, ()),
    "apply_gated_linear_units": (make_bert, ()),
    "apply_stochastic_depth": (functools.partial(make_resnet, "BasicBlock"), ("ResNetBottleneck",)),
}


@pytest.mark.parametrize(
    "name", [name for name in cf.__all__ if name.startswith("apply_") and "optimizers" in _arguments_of(name)]
)
def test_optimizer_of_another_model_raises(name):
    """An optimizer of another model raises before anything changes."""
    make, arguments = FITTING.get(name, (functools.partial(make_resnet, "BasicBlock"), ()))
    model, other = make()[0], nn.Linear(2, 2)
    before = repr(model)

    with pytest.raises(
        ValueError, match=r"optimizers must hold parameters of the model, got SGD with none of those of"
    ):
        getattr(cf, name)(model, *arguments, optimizers=torch.optim.SGD(other.parameters(), lr=0.1))

    assert repr(model) == before


def test_unrelated_second_optimizer_is_allowed():
    """A second optimizer may have, for instance, a loss's parameters."""
    model, loss = nn.Sequential(nn.LayerNorm(2)), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (loss, model)]

    assert cf.apply_low_precision_layernorm(model, torch.bfloat16, optimizers)

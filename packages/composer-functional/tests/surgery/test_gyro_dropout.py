"""Gyro dropout applied to models."""

from __future__ import annotations

import pytest
import timm
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from composer import functional as cf

SETTINGS = {"iters_per_epoch": 6, "max_epoch": 2, "p": 0.5, "sigma": 4, "tau": 2}


class Noise(nn.Dropout):
    """A dropout subclass with another forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + self.p


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Sequential(nn.ReLU(), nn.Dropout(0.9)), nn.Linear(16, 3))


class TestApplyGyroDropout:
    def test_replaces_every_dropout(self):
        """All dropout layers are replaced with the given settings, for any rate."""
        model = _network()

        report = cf.apply_gyro_dropout(model, **SETTINGS)

        assert [(entry.paths, entry.old, entry.new) for entry in report] == [
            (("1",), "Dropout", "GyroDropout"),
            (("2.1",), "Dropout", "GyroDropout"),
        ]
        layer = model[2][1]
        assert (layer.p, layer.sigma, layer.tau, layer.period) == (0.5, 4, 2, 6)

    def test_other_dropouts_are_unchanged(self):
        """Disabled layers, subclasses and other kinds of dropout do not change."""
        model = nn.Sequential(nn.Dropout(0.0), Noise(0.1), nn.Dropout2d(0.5), nn.AlphaDropout(0.5))

        assert not cf.apply_gyro_dropout(model, **SETTINGS)

    def test_on_a_language_model(self):
        """BERT trains with it, except for attention weights, whose dropout is a function of p."""
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        )
        config._attn_implementation = "eager"
        model = BertModel(config, add_pooling_layer=False).eval()
        tokens = torch.arange(12).view(2, 6)
        expected = model(tokens).last_hidden_state

        report = cf.apply_gyro_dropout(model, **SETTINGS)
        unchanged = model(tokens).last_hidden_state
        model.train()(tokens).last_hidden_state.square().sum().backward()

        assert len(report) == 1 + 2 * 2
        assert not any(path.endswith("attention.self.dropout") for entry in report for path in entry.paths)
        assert {layer.attention.self.dropout.p for layer in model.encoder.layer} == {0.1}
        assert torch.equal(unchanged, expected)
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_gpt2_keeps_the_dropout_of_attention_weights(self):
        """Modules that attention only reads do not change; those it calls are replaced."""
        from transformers import GPT2Config, GPT2Model

        model = GPT2Model(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2))

        report = cf.apply_gyro_dropout(model, **SETTINGS)

        assert [entry.paths for entry in report] == [("drop",), ("h.0.attn.resid_dropout",), ("h.0.mlp.dropout",)]

    def test_gradient_checkpointing_raises(self):
        """A second forward pass would take other masks: as Transformers, timm and torch mark such models."""
        config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9, bos_token_id=0, eos_token_id=0)
        language_model = transformers.GPT2LMHeadModel(config)
        if hasattr(language_model, "activation_checkpointing_enable"):  # its former name is deprecated
            language_model.activation_checkpointing_enable()
        else:
            language_model.gradient_checkpointing_enable()
        images = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
        images.set_grad_checkpointing()
        wrapped = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2), nn.Dropout())))

        for model in (language_model, images, wrapped):
            with pytest.raises(ValueError, match="must not use gradient checkpointing with GyroDropout"):
                cf.apply_gyro_dropout(model, 10, 2, 0.5, 8, 2)
            assert not cf.count_module_instances(model, cf.GyroDropout)

"""The parts of Transformers' models that surgery supports."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from composer.functional.surgery.architectures import (
    ARCHITECTURES,
    check_implementation,
    find_attention_dropouts,
    find_instances,
    find_loaded_class,
    lift_limits,
)
from fixtures.models import make_transformer

GPT2, BERT, _ = ARCHITECTURES


class TestFinding:
    def test_attention_and_positions(self):
        """Each architecture finds its own attention with its heads, and its position embedding."""
        models = {GPT2: make_transformer("gpt2"), BERT: make_transformer("bert")}

        for architecture, model in models.items():
            [(path, attention)] = architecture.find_attentions(model)
            [(embedding, replacement)] = architecture.find_positions(model)
            assert model.get_submodule(path) is attention
            assert architecture.num_heads(attention) == 2
            assert embedding.weight.shape == (32, 16)
            assert replacement(torch.arange(4)).abs().sum() == 0
        assert GPT2.find_attentions(models[BERT]) == []

    def test_classes_are_not_imported(self):
        """Looking for a class of a module that is not imported imports nothing."""
        program = """
import sys
from composer.functional.surgery.architectures import ARCHITECTURES
import torch
print([one.find_attentions(torch.nn.Linear(2, 2)) for one in ARCHITECTURES], "transformers" in sys.modules)
"""

        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

        assert done.stdout.strip() == "[[], [], []] False"
        assert find_loaded_class("not_imported", "Model") is None
        assert find_instances(nn.Linear(2, 2), "not_imported", "Model") == []

    @pytest.mark.parametrize("kind", ["gpt2", "bert"])
    def test_dropouts_of_attention(self, kind):
        """The dropout of the probabilities is found, the others are not."""
        model = make_transformer(kind)

        [dropout] = find_attention_dropouts(model)

        assert isinstance(dropout, nn.Dropout)
        assert sum(isinstance(module, nn.Dropout) for module in model.modules()) > 1


def test_implementation_without_bias_raises():
    """Flash attention takes no bias; the error has the remedy."""
    model = make_transformer("gpt2")
    [(_, attention)] = GPT2.find_attentions(model)
    check_implementation(attention)
    attention.config._attn_implementation = "flash_attention_2"

    with pytest.raises(ValueError, match=r'set_attn_implementation\("sdpa"\)'):
        check_implementation(attention)


def test_limits_are_lifted():
    """The position ids of BERT have the new length."""
    model = make_transformer("bert")

    lift_limits(model, BERT.find_attentions(model), 100)

    assert model.bert.embeddings.position_ids.shape == (1, 100)

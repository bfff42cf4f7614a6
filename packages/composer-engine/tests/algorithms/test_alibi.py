"""Alibi: attention with linear biases instead of positions."""

import torch
from torch import nn

from composer import functional as cf
from composer.algorithms import Alibi
from fixtures.models import WithLoss
from fixtures.surgery import TOKENS, Surgery, start, transformer


class TestAlibi(Surgery):
    inserted = cf.AlibiBias
    batch = TOKENS
    unfit = (ValueError, "GPT-2")

    def make(self):
        return Alibi(64)

    def make_model(self):
        return transformer("gpt2")

    def test_sequences_are_folded(self):
        """A batch of (N, L) becomes (4 N, L / 4), in token order."""
        engine = start(transformer("gpt2"), Alibi(64), batch=TOKENS)

        engine.run_event("after_dataloader")

        assert engine.state.batch["input_ids"].shape == (8, 4)
        assert torch.equal(engine.state.batch["input_ids"].reshape(2, 16), TOKENS["input_ids"])


class OwnAttention(nn.Module):
    """A custom attention with an activation as in a feed-forward block."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def attend(self, hidden):
        return (hidden @ hidden.mT).softmax(-1) @ hidden

    def forward(self, hidden):
        return self.attend(self.act(self.up(hidden)))


def attend_with_bias(self, hidden):
    """Attend with the bias added."""
    length = hidden.shape[-2]
    return (hidden @ hidden.mT + self.alibi(length, length)).softmax(-1) @ hidden


def test_own_attention():
    """Settings describe the attention of the user's own model."""
    model = WithLoss(nn.Sequential(nn.Embedding(9, 4), OwnAttention()))

    start(
        model,
        Alibi(
            64,
            heads_per_layer=1,
            position_embedding_attribute="network.0",
            attention_module=OwnAttention,
            attr_to_replace="attend",
            alibi_attention=attend_with_bias,
            causal=True,
        ),
    )

    assert isinstance(model.network[1].alibi, cf.AlibiBias)
    assert model.network[1].alibi.causal

"""ALiBi applied to a custom attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from composer import functional as cf


class OwnAttention(nn.Module):
    """A custom attention."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(8, 24)
        self.register_buffer("causal", torch.ones(6, 6, dtype=torch.bool).tril(), persistent=False)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        length = query.shape[-2]
        scores = (query @ key.mT).masked_fill(~self.causal[:length, :length], -torch.inf)
        return scores.softmax(-1) @ value

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.in_proj(hidden).chunk(3, -1))
        return self.attend(query, key, value).transpose(1, 2).flatten(2)


class OwnModel(nn.Module):
    """A model with position embeddings and two attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"tokens": nn.Embedding(9, 8), "positions": nn.Embedding(6, 8)})
        self.attentions = nn.ModuleList([OwnAttention(), OwnAttention()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.body["tokens"](ids) + self.body["positions"](torch.arange(ids.shape[1]))
        for attention in self.attentions:
            hidden = hidden + attention(hidden)
        return hidden


def attend_with_bias(self: OwnAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The attention above, with the bias."""
    length = query.shape[-2]
    scores = query @ key.mT + self.alibi(length, length)
    return scores.masked_fill(~self.causal[:length, :length], -torch.inf).softmax(-1) @ value


def enlarge_mask(attention: OwnAttention, max_sequence_length: int) -> OwnAttention:
    """Enlarge the stored mask."""
    attention.causal = torch.ones(max_sequence_length, max_sequence_length, dtype=torch.bool).tril()
    return attention


OWN = {
    "heads_per_layer": 2,
    "attention_module": OwnAttention,
    "attr_to_replace": "attend",
    "alibi_attention": attend_with_bias,
}


class TestCustomAttention:
    def test_custom_attention(self):
        """The user's function is called with the slopes; position embeddings and length limits are removed."""
        model = OwnModel()
        optimizer = torch.optim.AdamW(model.parameters())

        report = cf.apply_alibi(
            model,
            20,
            optimizer,
            **OWN,
            position_embedding_attribute="body.positions",
            mask_replacement_function=enlarge_mask,
        )
        with torch.no_grad():
            model.attentions[0].in_proj.weight[:8] = 0
            model.attentions[0].in_proj.bias[:8] = 0
        hidden = torch.randn(1, 20, 8)
        attended = model.attentions[0](hidden)

        values = model.attentions[0].in_proj(hidden)[0, :, 16:]
        for head, slope in enumerate((2**-4, 2**-8)):
            weights = torch.tensor([-slope * (19 - j) for j in range(20)]).softmax(0)
            mean = weights @ values[:, 4 * head : 4 * head + 4]
            torch.testing.assert_close(attended[0, -1, 4 * head : 4 * head + 4], mean)
        assert [entry.paths for entry in report] == [("body.positions",), ("attentions.0",), ("attentions.1",)]
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters())) == 5
        assert model(torch.randint(9, (2, 20))).shape == (2, 20, 8)

    def test_copies_are_independent(self):
        """The replaced method of a copy belongs to the copy."""
        model = OwnModel()
        cf.apply_alibi(model, 20, **OWN)

        twin = copy.deepcopy(model)

        assert twin.attentions[0].attend.__self__ is twin.attentions[0]

    def test_bias_is_not_causal(self):
        """The bias has distances in both directions; masking is up to the function."""
        model = OwnModel()
        cf.apply_alibi(model, 20, **OWN)

        bias = model.attentions[0].alibi(2, 2)

        assert bias.tolist() == [[[[0, -(2**-4)], [-(2**-4), 0]], [[0, -(2**-8)], [-(2**-8), 0]]]]

    def test_causal_bias_masks(self):
        """With causal=True the bias masks the keys after the query, so that the function does not have to."""
        model = OwnModel()
        cf.apply_alibi(model, 20, **OWN, causal=True)

        weights = model.attentions[0].alibi(2, 2).softmax(-1)

        assert weights[0, :, 0].tolist() == [[1, 0], [1, 0]]

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"heads_per_layer": 0}, ValueError, "num_heads must be at least 1, got 0"),
            ({"heads_per_layer": 2.0}, TypeError, "num_heads must be an int, got 2.0"),
            ({"attention_module": "OwnAttention"}, TypeError, "attention_module must be a class of modules"),
            ({"attention_module": nn.Conv2d}, ValueError, "attention_module must be a class that is in the model"),
            (
                {"attr_to_replace": "_attn"},
                ValueError,
                "must be an attribute of OwnAttention, got '_attn'",
            ),
            ({"position_embedding_attribute": "wpe"}, ValueError, "got 'wpe', where there is nothing"),
            ({"position_embedding_attribute": "attentions.0"}, ValueError, "where there is a OwnAttention"),
        ],
    )
    def test_invalid_arguments_raise(self, change: dict[str, Any], error: type[Exception], message: str):
        """The error names the argument, and the model does not change."""
        model = OwnModel()
        before = str(model)

        with pytest.raises(error, match=message):
            cf.apply_alibi(model, 20, **{**OWN, **change})

        assert str(model) == before

"""The specification's code blocks that need only composer-functional and Transformers run.

In our own words: models and data are small and random, and where a page has a slip its meaning is tested. The page's
ALiBi block imports an attention and a mask of an earlier implementation; here they are the user's own functions, and
they replace the method that current Transformers has. The embedding of its ``GPT2Model`` is ``wpe``.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2Model
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from composer import functional as cf

HEADS, WIDTH = 12, 48


def _attn(self, hidden_states, past_key_values=None, attention_mask=None, **_):
    """Attend causally, and to near tokens more."""
    length = hidden_states.shape[1]
    queries, keys, values = (
        each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.c_attn(hidden_states).chunk(3, -1)
    )
    logits = queries @ keys.mT * self.head_dim**-0.5 + self.alibi(length, length)
    probabilities = logits.masked_fill(~self.look_back[:length, :length], -torch.inf).softmax(-1)
    return self.c_proj((probabilities @ values).transpose(1, 2).flatten(2)), probabilities


def enlarge_mask(module, max_sequence_length):
    """Store a causal mask that is long enough."""
    module.look_back = torch.ones(max_sequence_length, max_sequence_length, dtype=torch.bool).tril()
    return module


def _gpt2():
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 16}
    return GPT2Model(GPT2Config(vocab_size=50, bos_token_id=1, eos_token_id=2, **sizes)).eval()


class TestOverview:
    def test_alibi_with_all_its_keywords(self):
        """The long form uses the user's attention in every layer; zero queries give each head's slope."""
        model = _gpt2()

        report = cf.apply_alibi(
            model=model,
            heads_per_layer=12,
            max_sequence_length=8192,
            position_embedding_attribute="wpe",
            attention_module=GPT2Attention,
            attr_to_replace="forward",
            alibi_attention=_attn,
            mask_replacement_function=enlarge_mask,
        )
        with torch.no_grad():
            nn.init.zeros_(model.h[0].attn.c_attn.weight[:, :WIDTH])
            _, probabilities = model.h[0].attn(torch.randn(1, 40, WIDTH))

        assert [entry.paths for entry in report] == [("wpe",), ("h.0.attn",), ("h.1.attn",)]
        steps = (probabilities[0, :, -1, 1:] / probabilities[0, :, -1, :-1]).log()
        eight = [2.0**-i for i in range(1, 9)]
        between = [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
        torch.testing.assert_close(
            steps, torch.tensor([*eight, *between])[:, None].expand(-1, 39), rtol=1e-3, atol=1e-4
        )
        assert model(torch.randint(50, (2, 40))).last_hidden_state.shape == (2, 40, WIDTH)
        assert model.config.max_position_embeddings == 8192

    def test_both_forms_agree(self):
        """The user's functions and the short form give the same outputs."""
        models = [_gpt2(), _gpt2()]
        models[1].load_state_dict(models[0].state_dict())
        ids = torch.randint(50, (2, 40))

        cf.apply_alibi(models[0], max_sequence_length=64)
        cf.apply_alibi(
            models[1],
            max_sequence_length=64,
            heads_per_layer=12,
            position_embedding_attribute="wpe",
            attention_module=GPT2Attention,
            attr_to_replace="forward",
            alibi_attention=_attn,
            mask_replacement_function=enlarge_mask,
        )

        torch.testing.assert_close(*(model(ids).last_hidden_state for model in models))

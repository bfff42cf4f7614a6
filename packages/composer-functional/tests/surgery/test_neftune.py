"""Replacing the embedding of a model by one that adds noise."""

import pytest
import torch
from torch import nn

from composer import functional as cf


def make_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))


class TestSurgery:
    def test_model_of_transformers(self):
        """The embedding of tokens keeps its weight, which GPT-2's head shares, and evaluation does not change."""
        model, ids = make_gpt2().eval(), torch.arange(12).view(2, 6)
        before = model(ids).logits

        report = cf.apply_neftune(model)

        assert [one.paths for one in report] == [("transformer.wte",)]
        assert model.lm_head.weight is model.transformer.wte.weight
        assert torch.equal(model(ids).logits, before)
        assert not cf.apply_neftune(model)

    def test_encoder_and_decoder(self):
        """The encoder of a model that also has a decoder gets the noise."""
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        config = T5Config(vocab_size=64, **sizes, dropout_rate=0.0, decoder_start_token_id=0)
        model, ids = T5ForConditionalGeneration(config), torch.arange(12).view(2, 6)
        plain = model(ids, labels=ids).loss

        cf.apply_neftune(model)
        model.encoder.embed_tokens.noise = cf.draw_embedding_noise(ids, 16)

        assert model(ids, labels=ids).loss != plain
        assert model(ids, labels=ids).loss == plain
        assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight

    def test_noise_changes_the_loss_in_training(self):
        """Assigned noise changes the next loss."""
        model, ids = make_gpt2().eval(), torch.arange(12).view(2, 6)
        cf.apply_neftune(model)
        model.transformer.wte.train()

        plain = model(ids, labels=ids).loss
        model.transformer.wte.noise = cf.draw_embedding_noise(ids, 16)
        noisy = model(ids, labels=ids).loss

        assert noisy != plain
        assert model(ids, labels=ids).loss == plain

    def test_by_name(self):
        """One of several embeddings is chosen by its name."""
        model = nn.ModuleDict({"tokens": nn.Embedding(4, 2), "positions": nn.Embedding(4, 2)})

        report = cf.apply_neftune(model, "tokens")

        assert str(report) == "1 module replaced\n  tokens: Embedding -> NoisyEmbedding"

    @pytest.mark.parametrize(
        ("layers", "name", "text"),
        [
            ({"a": nn.Embedding(4, 2), "b": nn.Embedding(4, 2)}, None, "The embeddings of ModuleDict are 'a', 'b'"),
            ({"a": nn.Embedding(4, 2)}, "b", "got 'b', which determines none"),
            ({"a": nn.Linear(4, 2)}, None, "The embeddings of ModuleDict are none"),
        ],
    )
    def test_embedding_that_is_not_found_raises(self, layers, name, text):
        """The error names the embeddings."""
        with pytest.raises(ValueError, match=text):
            cf.apply_neftune(nn.ModuleDict(layers), name)

"""The embedding of a Transformers model has a row for each token of its tokenizer."""

import pytest
import torch
from transformers import GPT2LMHeadModel

from composer.models import HuggingFaceModel


class TestFitEmbedding:
    def test_too_many_tokens(self, make_model, tokenizer):
        """A tokenizer with too many tokens raises, with both sizes and the remedy."""
        model = make_model("gpt2", vocab_size=300, bos_token_id=1, eos_token_id=1)

        with pytest.raises(
            ValueError, match=rf"has {len(tokenizer)} tokens, but .* 300 rows.*allow_embedding_resizing"
        ):
            HuggingFaceModel(model, tokenizer)

    def test_resizing(self, make_model, make_batch, tokenizer):
        """On request the embedding is enlarged, keeps its rows, and stays tied to the output layer."""
        bare = make_model("gpt2", vocab_size=300)
        before = bare.get_input_embeddings().weight.clone()

        model = HuggingFaceModel(bare, tokenizer, allow_embedding_resizing=True)

        after = bare.get_input_embeddings().weight
        assert len(after) == len(tokenizer) == model.config.vocab_size
        assert torch.equal(after[:300], before)
        assert bare.get_output_embeddings().weight is after
        assert model(make_batch("gpt2"))["logits"].shape[-1] == len(tokenizer)

    def test_larger_embedding_is_unchanged(self, make_model, tokenizer):
        """An embedding with more rows than tokens does not change."""
        bare = make_model("gpt2", vocab_size=400)

        HuggingFaceModel(bare, tokenizer, allow_embedding_resizing=True)

        assert len(bare.get_input_embeddings().weight) == 400

    @pytest.mark.parametrize(
        "methods", [["resize_token_embeddings"], ["resize_token_embeddings", "get_input_embeddings"]]
    )
    def test_an_embedding_that_cannot_be_resized(self, make_model, tokenizer, methods):
        """A model without the methods of embeddings is used as it is, with a warning if it has too few rows."""

        def missing(*_, **__):
            raise NotImplementedError

        without = type("Without", (GPT2LMHeadModel,), dict.fromkeys(methods, missing))
        bare = make_model("gpt2", cls=without, vocab_size=300)

        with pytest.warns(UserWarning, match="cannot resize its embedding of 300 rows"):
            model = HuggingFaceModel(bare, tokenizer, allow_embedding_resizing=True)

        assert model.resized_embeddings == ()
        with pytest.raises(ValueError, match="300 rows"):
            HuggingFaceModel(bare, tokenizer)

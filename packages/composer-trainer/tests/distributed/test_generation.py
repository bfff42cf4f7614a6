"""A sharded language model generates and is evaluated in two processes."""

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")


class TestShardedModel:
    def test_generates_as_a_replicated_one(self, two_generations):
        """Each process samples other tokens, until the last process is done; they are those of the complete model."""
        for result in two_generations:
            assert result["sharded"]["sampled"] == result["replicated"]["sampled"]
            assert result["sharded"]["greedy"] == result["replicated"]["greedy"]

        lengths = [len(words.split()) for result in two_generations for words in result["sharded"]["sampled"]]
        assert len(set(lengths)) > 1

    def test_metrics_of_logits(self, two_generations):
        """With use_logits=True, evaluation calls the model without labels, and the metric is the same."""
        for result in two_generations:
            assert result["sharded"]["cross entropy"] == pytest.approx(result["replicated"]["cross entropy"])

"""A sharded language model generates, is evaluated and saved in two processes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from composer.models import HuggingFaceModel

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# PEFT asks Transformers by a former name whether activations are kept.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
KINDS = ["replicated", "sharded"]


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

    def test_folder_of_transformers(self, two_generations):
        """Transformers reads the complete evaluation weights; they are those of a replicated model."""
        folder = Path(two_generations[0]["adapters"]["folder"])
        saved = {kind: load_file(folder / kind / "pretrained" / "model.safetensors") for kind in KINDS}

        torch.testing.assert_close(saved["sharded"], saved["replicated"])
        read = transformers.GPT2LMHeadModel.from_pretrained(folder / "sharded" / "pretrained")
        assert type(read).__name__ in read.config.architectures
        assert torch.equal(read.transformer.wte.weight, saved["sharded"]["transformer.wte.weight"])

    @pytest.mark.parametrize("kind", KINDS)
    def test_checkpoint_to_transformers(self, two_generations, kind):
        """A checkpoint of several files has the same weights as the folder, bit for bit: the averages."""
        folder = Path(two_generations[0]["adapters"]["folder"]) / kind
        model, _ = HuggingFaceModel.hf_from_composer_checkpoint(folder / "checkpoints" / "latest")

        read = transformers.GPT2LMHeadModel.from_pretrained(folder / "pretrained").state_dict()
        assert len(list((folder / "checkpoints" / "latest").glob("model*"))) == (2 if kind == "sharded" else 1)
        assert read.keys() == model.state_dict().keys()
        assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())

    def test_adapters(self, two_generations):
        """Of a sharded model with adapters, checkpoint and folder have these alone, with equal values."""
        folder = Path(two_generations[0]["adapters"]["folder"])
        base, folder = transformers.GPT2LMHeadModel.from_pretrained(folder / "base"), folder / "adapters"

        read = peft.PeftModel.from_pretrained(base, folder / "pretrained").state_dict()
        model, _ = HuggingFaceModel.hf_from_composer_checkpoint(
            folder / "checkpoints" / "latest", base_model=folder.parent / "base"
        )

        trained = {name: value for name, value in model.state_dict().items() if "lora_" in name}
        assert sum(bool(value.any()) for value in trained.values()) == len(trained) == 4
        assert all(torch.equal(read[name], value) for name, value in trained.items())
        assert len(load_file(folder / "pretrained" / "adapter_model.safetensors")) == len(trained)

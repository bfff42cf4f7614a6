"""Small Transformers models with random weights, and the standard library's sources as text for them."""

import hashlib
import inspect
import json
import textwrap

import pytest
import torch
import xxhash


@pytest.fixture(scope="session")
def sign():
    """Return a function that writes a checkpoint's manifest like composer-trainer."""

    def write(folder):
        contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
        data = {
            "format": "composer-checkpoint",
            "files": {name: {"xxh3_128": xxhash.xxh3_128_hexdigest(content)} for name, content in contents.items()},
        }
        text = json.dumps(data, sort_keys=True, indent=1) + "\n"
        data["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(data, sort_keys=True, indent=1) + "\n")

    return write


@pytest.fixture(scope="session")
def lines():
    """Return lines of a standard library module."""
    return [line.strip() for line in inspect.getsource(json.decoder).splitlines() if len(line.strip()) > 20]


@pytest.fixture(scope="session")
def tokenizer(lines):
    """Return a tokenizer trained on that text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["[PAD]", "[EOS]", "[MASK]"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*lines, inspect.getsource(textwrap)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", eos_token="[EOS]", mask_token="[MASK]", model_max_length=64
    )


@pytest.fixture
def make_model(tokenizer):
    """Return a function that creates a small model of a kind, with settings."""
    import transformers

    size, pad, eos = len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id
    common = {"vocab_size": size, "pad_token_id": pad}
    ends = {"bos_token_id": eos, "eos_token_id": eos}
    bert = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    gpt2 = {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    t5 = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": pad}
    bart = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    bart |= {
        "is_decoder": True,
        "is_encoder_decoder": False,
        "max_position_embeddings": 64,
        "forced_eos_token_id": None,
    }
    kinds = {
        "classifier": ("BertForSequenceClassification", "BertConfig", {**common, **bert}),
        "masked": ("BertForMaskedLM", "BertConfig", {**common, **bert}),
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**common, **gpt2, **ends, "loss_type": "ForCausalLMLoss"}),
        "t5": ("T5ForConditionalGeneration", "T5Config", {**common, **t5, "eos_token_id": eos}),
        "llama": ("LlamaForCausalLM", "LlamaConfig", {**common, **bert, **ends}),
        "bart": ("BartForCausalLM", "BartConfig", {**common, **bart, **ends}),
    }

    def make(kind, seed=0, cls=None, **settings):
        model_name, config_name, own = kinds[kind]
        torch.manual_seed(seed)
        config = getattr(transformers, config_name)(**own | settings)
        return (cls or getattr(transformers, model_name))(config)

    return make


@pytest.fixture
def make_batch(tokenizer, lines):
    """Return a function that creates a batch of padded lines with labels for a kind of model."""

    def make(kind, count=8, skip=0):
        batch = tokenizer(lines[skip : skip + count], padding=True, truncation=True, max_length=24, return_tensors="pt")
        batch.pop("token_type_ids", None)
        real = batch["attention_mask"] == 1
        if kind == "classifier":
            batch["labels"] = torch.tensor(["=" in line for line in lines[skip : skip + count]]).long()
        elif kind == "masked":
            masked = real & (torch.arange(real.shape[1]) % 3 == 1)
            batch["labels"] = batch["input_ids"].masked_fill(~masked, -100)
            batch["input_ids"] = batch["input_ids"].masked_fill(masked, tokenizer.mask_token_id)
        elif kind == "t5":
            batch["labels"] = batch["input_ids"][:, :6].masked_fill(~real[:, :6], -100)
        else:
            batch["labels"] = batch["input_ids"].masked_fill(~real, -100)
        return batch

    return make

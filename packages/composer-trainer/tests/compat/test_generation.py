"""Generation stops at strings."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from composer.compat.generation import stop_sequences_criteria  # noqa: E402  (requires Transformers)


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids):
        return "".join(chr(ord("a") + one) for one in ids)


def test_each_sequence_stops_at_its_string():
    """Strings in the prompt do not count, and each sequence is compared."""
    criteria = stop_sequences_criteria(Letters(), ["bc", "d"], 2, 3)
    prompt = [1, 2]

    done = criteria(torch.tensor([[*prompt, 0, 0], [*prompt, 1, 2], [*prompt, 0, 3]]), None)

    assert done.tolist() == [False, True, True]


def test_generation_ends():
    """A model's generation ends when all sequences have the string."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=4, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt = torch.tensor([[1, 2]])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    first = Letters().decode(model.generate(prompt, **options)[0, 2:4].tolist())

    tokens = model.generate(prompt, stopping_criteria=stop_sequences_criteria(Letters(), [first], 2, 1), **options)

    assert Letters().decode(tokens[0, 2:].tolist()) == first

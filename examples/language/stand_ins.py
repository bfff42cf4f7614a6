"""What the programs beside it would download: a tokenizer, a configuration, and chats, made of Python's ``inspect``.

Replace them by ``AutoTokenizer.from_pretrained(...)``, ``AutoModelForCausalLM.from_pretrained(...)`` and your own data.
"""

import inspect
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

MARKS = ["[PAD]", "[UNK]", "<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for one in messages %}{{ '<|' + one.role + '|>' + one.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FUNCTIONS = [one for _, one in inspect.getmembers(inspect, inspect.isfunction) if one.__doc__]


def load_pairs() -> list[dict[str, list[dict[str, str]]]]:
    """Return a question about each function, its description as the better answer, and a line of code as the other."""
    return [
        {
            "prompt": [{"role": "user", "content": f"What does {one.__name__} do?"}],
            "chosen": [{"role": "assistant", "content": inspect.getdoc(one).splitlines()[0]}],
            "rejected": [{"role": "assistant", "content": inspect.getsource(one).splitlines()[0]}],
        }
        for one in FUNCTIONS
    ]


def load_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words, with a chat template."""
    texts = [message["content"] for pair in load_pairs() for chat in pair.values() for message in chat]
    backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))  # noqa: S106
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=MARKS, show_progress=False))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "<|end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **names)


def load_config(tokenizer: PreTrainedTokenizerFast, **settings: Any) -> LlamaConfig:
    """Return the configuration of a tiny Llama."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return LlamaConfig(vocab_size=len(tokenizer), **ids, **sizes, **settings)

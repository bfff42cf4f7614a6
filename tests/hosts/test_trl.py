"""Algorithms in the trainers of TRL, which are subclasses of the Trainer of Transformers."""

import pytest
import torch
from comparison import assert_same

trl = pytest.importorskip("trl", reason="TRL is not installed")

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast  # noqa: E402

from composer.algorithms import EMA, Alibi, ChunkedCrossEntropy, Distillation, LabelSmoothing, SeqLengthWarmup  # noqa: E402
from composer.core.evaluator import evaluation_weights  # noqa: E402
from composer.integrations.transformers import composer_trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # TRL and datasets have warnings of their own
WORDS = "abcdefgh"


def make_parts():
    """Return a tiny language model and its tokenizer."""
    tokens = Tokenizer(models.WordLevel({word: place for place, word in enumerate([*WORDS, "<end>"])}, "<end>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=16, n_embd=16, n_layer=1, n_head=2, **no_dropout))
    return model, PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>", pad_token="<end>")


def arguments(folder, **settings):
    """Return the arguments of a trainer that trains for four steps without writing a file."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        **settings,
    }


def count_calls(trainer):
    """Train, and return the trainer, which counts the forward passes of the model."""
    trainer.calls = 0
    trainer.model.transformer.register_forward_hook(lambda *_: setattr(trainer, "calls", trainer.calls + 1))
    trainer.train()
    return trainer


def make_trainer(folder, algorithms=None, **settings):
    """Return a trainer of TRL for a tiny language model."""
    model, tokenizer = make_parts()
    return (trl.SFTTrainer if algorithms is None else composer_trainer(trl.SFTTrainer))(
        model=model,
        args=trl.SFTConfig(**arguments(folder, **settings)),
        train_dataset=Dataset.from_dict({"text": [" ".join(WORDS[place % 8 :]) + " a b" for place in range(16)]}),
        processing_class=tokenizer,
        **({} if algorithms is None else {"algorithms": algorithms}),
    )


def make_preference_trainer(folder, algorithms=None):
    """Return a trainer of TRL for a tiny language model on pairs of answers."""
    model, tokenizer = make_parts()
    pairs = {
        "prompt": ["a b"] * 16,
        "chosen": [" " + " ".join(WORDS[place % 8 :]) for place in range(16)],
        "rejected": [" " + " ".join(WORDS[: 1 + place % 8]) for place in range(16)],
    }
    return (trl.DPOTrainer if algorithms is None else composer_trainer(trl.DPOTrainer))(
        model=model,
        ref_model=make_parts()[0],
        args=trl.DPOConfig(**arguments(folder)),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer,
        **({} if algorithms is None else {"algorithms": algorithms}),
    )


def train(folder, algorithms=None, **settings):
    """Train for four steps on texts."""
    return count_calls(make_trainer(folder, algorithms, **settings))


def train_preferences(folder, algorithms=None):
    """Train for four steps on pairs of answers."""
    return count_calls(make_preference_trainer(folder, algorithms))


def test_weights_of_trl(tmp_path):
    """With averages alone the weights are those of TRL without algorithms, and the averages are others."""
    trainer = train(tmp_path, [EMA("2ba")])
    expected = train(tmp_path).model.state_dict()
    assert_same(trainer.model.state_dict(), expected)
    assert trainer.algorithm_adapter.state.timestamp.batch == "4ba"
    with evaluation_weights(trainer.algorithm_adapter.state), pytest.raises(AssertionError, match="weights differ"):
        assert_same(trainer.model.state_dict(), expected)


@pytest.mark.parametrize("construct", [make_trainer, make_preference_trainer])
def test_loss_in_chunks(tmp_path, construct):
    """TRL multiplies by the head's weight without calling the head, so replacing the head raises at construction."""
    with pytest.raises(ValueError, match=r"ChunkedCrossEntropy cannot run in (SFT|DPO)Trainer, .* calling the head"):
        construct(tmp_path, [ChunkedCrossEntropy(z_loss=1.0)])


def test_shorter_sequences(tmp_path):
    """An algorithm that changes batches changes what TRL trains on."""
    weights = train(tmp_path, [SeqLengthWarmup(min_seq_length=2, max_seq_length=11, step_size=1)]).model.state_dict()
    with pytest.raises(AssertionError, match="weights differ"):
        assert_same(weights, train(tmp_path).model.state_dict())


@pytest.mark.parametrize(
    "settings", [{}, {"packing": True, "max_length": 12}, {"padding_free": True, "max_length": None}]
)
@pytest.mark.parametrize("make", [list, lambda: [EMA("2ba")]], ids=["none", "EMA"])
def test_packed_sequences(tmp_path, make, settings):
    """A step costs one forward pass as in TRL alone and trains the same, also with several sequences in one row."""
    alone, ours = train(tmp_path, **settings), train(tmp_path, make(), **settings)
    assert ours.calls == alone.calls == 4
    assert_same(ours.model.state_dict(), alone.model.state_dict())
    samples = ours.algorithm_adapter.state.timestamp.sample
    assert samples > 16 if "packing" in settings else samples == 16


@pytest.mark.parametrize("make", [lambda: LabelSmoothing(0.1), lambda: Distillation(make_parts()[0])])
@pytest.mark.parametrize("construct", [make_trainer, make_preference_trainer])
def test_changed_labels(tmp_path, construct, make):
    """TRL computes losses of its own, so algorithms that change labels or the loss raise at construction."""
    message = r"(LabelSmoothing|Distillation) cannot run in (SFT|DPO)Trainer, which computes its loss without"
    with pytest.raises(ValueError, match=message):
        construct(tmp_path, [make()])


@pytest.mark.parametrize(
    "make",
    [lambda: Alibi(max_sequence_length=16), lambda: SeqLengthWarmup(min_seq_length=2, truncate=False)],
    ids=["Alibi", "SeqLengthWarmup"],
)
def test_changed_pairs(tmp_path, make):
    """An algorithm that changes the number of rows would pair answers with parts of others, which raises an error."""
    with pytest.raises(ValueError, match="rows"):
        train_preferences(tmp_path, [make()])

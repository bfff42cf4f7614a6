"""A small GPT-2 generates from prompts during training."""

import ast
import copy
import inspect
import textwrap

import pytest
import torch

from composer.callbacks import Generate
from composer.core import LoggerDestination
from composer.models import ComposerModel, HuggingFaceModel
from fixtures import small_run, trained

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

# Warnings of torchao, which transformers imports, when it is compiled for the first time.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:invalid escape sequence:{category}")
    for category in ("DeprecationWarning", "SyntaxWarning")
]

PROMPTS = ["def parse(", "import", "return the value of"]


@pytest.fixture(scope="module")
def tokenizer():
    """Return a tokenizer trained on sources of the standard library."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    learner = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([inspect.getsource(module) for module in (ast, textwrap)], learner)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


class Writer(ComposerModel):
    """A tiny GPT-2 with dropout that records its calls of generate."""

    def __init__(self, tokenizer):
        super().__init__()
        torch.manual_seed(1)
        config = transformers.GPT2Config(
            vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2, pad_token_id=0, eos_token_id=0
        )
        self.network = transformers.GPT2LMHeadModel(config)
        self.tokenizer = tokenizer
        self.asked = []

    def forward(self, batch):
        return self.network(input_ids=batch["input_ids"]).logits

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    def generate(self, input_ids, **options):
        ends_with_prompt = bool(options["attention_mask"][:, -1].all())
        self.asked.append((len(input_ids), ends_with_prompt, self.training))
        return self.network.generate(input_ids, **options)


class Tables(LoggerDestination):
    def __init__(self):
        self.tables = []

    def log_table(self, columns, rows, name="Table", step=None):
        self.tables.append((name, step, list(columns), [list(row) for row in rows]))


def fit(model, callbacks, **options):
    tables = Tables()
    options = {"loggers": tables, **options}
    text = inspect.getsource(textwrap)
    ids = torch.tensor(model.tokenizer(text)["input_ids"][:512]).reshape(4, 4, 32)
    batches = [{"input_ids": one} for one in ids]
    trained(model=model, train_dataloader=batches, callbacks=callbacks, **options)
    return tables.tables


class TestGenerate:
    def test_continues_the_prompts(self, tokenizer):
        """Each continuation equals greedy decoding of that prompt alone, with any padding."""
        model = Writer(tokenizer)

        (table,) = fit(model, Generate(PROMPTS, "1ep", max_new_tokens=6, do_sample=False))

        model.eval()
        expected = []
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            for _ in range(6):
                with torch.no_grad():
                    ids = torch.cat([ids, model.network(input_ids=ids).logits[:, -1:].argmax(dim=-1)], dim=1)
                if ids[0, -1] == 0:
                    break
            text = tokenizer.decode(ids[0], skip_special_tokens=True)
            expected.append([prompt, text.removeprefix(prompt)])
        assert table == ("generations", 4, ["prompt", "generation"], expected)
        assert all(generation for _, generation in expected)

    def test_batches_of_prompts(self, tokenizer):
        """Prompts are generated in batches of the given size, in evaluation mode, with left padding."""
        alone, together = Writer(tokenizer), Writer(tokenizer)

        one = fit(alone, Generate(PROMPTS, "1ep", batch_size=2, max_new_tokens=6, do_sample=False))
        other = fit(together, Generate(PROMPTS, "1ep", max_new_tokens=6, do_sample=False))

        assert one == other
        assert alone.asked == [(2, True, False), (1, True, False)]
        assert together.asked == [(3, True, False)]

    def test_without_a_padding_token(self, tokenizer):
        """Prompts that cannot be padded are generated one by one, with the same continuations."""
        writer = Writer(tokenizer)
        expected = fit(writer, Generate(PROMPTS, "1ep", batch_size=1, max_new_tokens=6, do_sample=False))
        unpadded = Writer(copy.deepcopy(tokenizer))
        unpadded.tokenizer.pad_token = None

        assert fit(unpadded, Generate(PROMPTS, "1ep", max_new_tokens=6, do_sample=False)) == expected
        assert unpadded.asked == [(1, True, False)] * 3

    @pytest.mark.parametrize(
        ("interval", "steps"),
        [("2ba", [2, 4, 6, 8]), ("3ba", [3, 6, 8]), ("1ep", [4, 8]), (2, [8]), ("0.5dur", [4, 8])],
    )
    def test_interval(self, tokenizer, interval, steps):
        """Texts are generated at the interval, and once at the end of the fit."""
        tables = fit(Writer(tokenizer), Generate("def", interval, max_new_tokens=1), max_duration="2ep")

        assert [step for _, step, _, _ in tables] == steps

    def test_no_logger_with_tables(self, tokenizer):
        """The first training without a logger of tables gives a warning; a subclass, which may log strings, none."""

        class Texts(Generate):
            pass

        generate = Generate("def", "1ep", max_new_tokens=1)

        with pytest.warns(UserWarning, match=r"no logger of this training shows\. Give loggers=ConsoleLogger\(\)"):
            fit(Writer(tokenizer), generate, loggers=[])
        for again in (generate, Texts("def", "1ep", max_new_tokens=1)):
            fit(Writer(tokenizer), again, loggers=[])

    def test_does_not_change_training(self, tokenizer):
        """With sampling and dropout, the weights are bit-identical with and without the callback."""
        trained = []
        for callbacks in ([], [Generate(PROMPTS, "1ba", max_new_tokens=3, do_sample=True)]):
            model = Writer(tokenizer)
            fit(model, callbacks)
            trained.append({name: tensor.clone() for name, tensor in model.state_dict().items()})

        assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])

    def test_model_without_a_tokenizer(self):
        """A model without tokenizer raises when the trainer is created."""
        config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=4, n_layer=1, n_head=1)
        model = HuggingFaceModel(transformers.GPT2LMHeadModel(config))

        with pytest.raises(TypeError, match=r"tokenizer .* that of HuggingFaceModel is None"):
            small_run(model=model, callbacks=Generate("a", 1))

    def test_model_without_generate(self):
        """A model without generate raises when the trainer is created."""
        with pytest.raises(TypeError, match="tokenizer and the method generate"):
            small_run(callbacks=Generate("a", 1))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [(([], 1), "prompts"), ((["a"], 1, 0), "batch_size"), ((["a"], "-1ba"), r"[Ii]nterval|negative|must be")],
    )
    def test_bad_arguments(self, arguments, message):
        """Invalid arguments raise at construction."""
        with pytest.raises(ValueError, match=message):
            Generate(*arguments)

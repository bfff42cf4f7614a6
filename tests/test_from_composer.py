"""Programs that were written for MosaicML Composer run unchanged.

The programs in ``from_composer`` use only Composer's names. They are new, and small data is drawn for them.
"""

import ast
import runpy
from pathlib import Path

import pytest
import torch

from composer.compat import scan_source

PROGRAMS = sorted((Path(__file__).parent / "from_composer").glob("*.py"))

pytestmark = [
    pytest.mark.filterwarnings("ignore:composer\\..* is a former name:DeprecationWarning"),
    # Programs prolong a training by a second fit, and have callbacks with numbers that are not saved.
    pytest.mark.filterwarnings("ignore:The learning rate rises from"),
    pytest.mark.filterwarnings("ignore:A run that is resumed from this checkpoint may differ"),
]


@pytest.fixture
def run(monkeypatch, set_command, tmp_path):
    """Return a function that runs a program with arguments in a temporary folder and returns its variables."""
    monkeypatch.chdir(tmp_path)
    deterministic = torch.are_deterministic_algorithms_enabled()

    def run(name, *arguments):
        path = Path(__file__).parent / "from_composer" / name
        set_command(path, *arguments)
        return runpy.run_path(str(path), run_name="__main__")

    yield run
    torch.use_deterministic_algorithms(deterministic)


def write_tiny_bert(folder):
    """Write a BERT with random weights and its tokenizer."""
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)


def test_image_classification(run, tmp_path):
    """A recipe of seven algorithms trains on images, evaluates, saves, and stops where it should."""
    torch.manual_seed(0)
    torch.save((torch.rand(128, 3, 32, 32), torch.randint(10, (128,))), tmp_path / "data.pt")

    variables = run("image_classification.py", "--data", tmp_path / "data.pt", "--max_duration", "2ep")

    trainer = variables["trainer"]
    assert trainer.state.timestamp.batch == 6
    assert {"BlurConv2d", "BlurMaxPool2d"} <= {type(module).__name__ for module in trainer.state.model.modules()}
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("ep*")) == ["ep1-ba3", "ep2-ba6"]
    assert "metrics/test/MulticlassAccuracy" in variables["logger"].data


def test_text_classification(run, tmp_path):
    """A model of Transformers is fine-tuned, saved, and written in the format of Transformers."""
    model = tmp_path / "bert"
    model.mkdir()
    write_tiny_bert(model)
    lines = [f"{number % 2}\t{'a good film' if number % 2 else 'a bad film'}" for number in range(64)]
    (tmp_path / "texts.txt").write_text("\n".join(lines))

    variables = run(
        "text_classification.py", "--model", model, "--texts", tmp_path / "texts.txt", "--folder", tmp_path / "out"
    )

    assert variables["trainer"].state.timestamp.batch == 6
    assert variables["logits"].shape == (8, 2)
    assert (tmp_path / "out" / "pretrained" / "model.safetensors").exists()
    assert (tmp_path / "out" / "logs-rank0.txt").stat().st_size > 0


def test_custom_algorithm(run):
    """A program's own algorithm, callback, logger and model are called at their events."""
    variables = run("custom_algorithm.py", "--duration", "12ba", "--interval", "4ba")

    assert variables["norms"].times == [0, 4, 8]
    logged = {name for _, name, _ in variables["lines"].lines}
    assert {
        "gradients/norm",
        "outputs/largest",
        "progress",
        "loss/train/total",
        "metrics/eval/MeanSquaredError",
    } <= logged
    assert variables["predictions"].shape == (64, 1)
    assert variables["trainer"].state.algorithms[0].num_replaced == 1


def test_diffusion(run, tmp_path):
    """A model of the program's own is averaged, evaluated, and sampled with its averages."""
    variables = run("diffusion.py", "--folder", tmp_path / "out")

    samples = torch.load(tmp_path / "out" / "samples.pt")
    assert list(samples) == [6, 12]
    assert samples[12].shape == (4, 1, 8, 8)
    logged = variables["memory"].data
    assert [step.batch.value for step, _ in logged["metrics/shapes/MeanSquaredError-late"]] == [6, 12]
    assert [step.batch.value for step, _ in logged["gradients/norm"]] == [0, 4, 8]
    assert (tmp_path / "out" / "shapes" / "ba12.pt").is_file()
    (ema,) = (one for one in variables["trainer"].state.algorithms if type(one).__name__ == "EMA")
    averages = ema.get_ema_model(variables["trainer"].state.model)
    drawn = averages.generate(torch.arange(4), 8).add(1).div(2)
    torch.testing.assert_close(drawn, samples[12])


def test_bert_pretraining(run, tmp_path):
    """A configuration chooses algorithms, and a schedule of the program's own sets the learning rates."""
    tokenizer = tmp_path / "bert"
    tokenizer.mkdir()
    write_tiny_bert(tokenizer)

    variables = run("bert_pretraining.py", f"tokenizer={tokenizer}", "algorithms=gradient_clipping,alibi")

    trainer = variables["trainer"]
    (logger,) = (one for one in trainer.logger.destinations if type(one).__name__ == "InMemoryLogger")
    rates = [rate / 5e-3 for _, rate in logger.data["lr-DecoupledAdamW/group0"]]
    falling = [passed**-0.5 for passed in range(1, 11)]
    assert rates == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1, *falling])
    assert "Alibi" in [type(one).__name__ for one in trainer.state.algorithms]
    assert "model.bert.embeddings.position_embeddings.weight" not in trainer.state.model.state_dict()
    assert 0 < trainer.state.eval_metric_values["MaskedAccuracy"] <= 1
    tokens = logger.data["tokens/all"][-1][1]
    assert tokens == 16 * 8 * 16
    assert [path.name for path in (tmp_path / "bert").glob("ep*")] == ["ep2-ba16"]


@pytest.mark.filterwarnings("ignore:device_train_microbatch_size=8 does not give")  # BatchNorm
@pytest.mark.parametrize("recipe", ["mild", "medium", "hot"])
def test_imagenet(run, recipe):
    """Each recipe trains and evaluates, in the end the classifier alone, on images of the size of the evaluation."""
    variables = run("imagenet.py", "--recipe_name", recipe)

    trainer, fix = variables["trainer"], variables["fix"]
    assert fix.began_at == 8
    assert [name for name, one in trainer.state.model.named_parameters() if one.requires_grad] == [
        "module.fc.weight",
        "module.fc.bias",
    ]
    assert {"BlurConv2d", "BlurMaxPool2d"} <= {type(module).__name__ for module in trainer.state.model.modules()}
    logged = variables["memory"].data
    assert len(logged["metrics/eval/MulticlassAccuracy"]) == 3
    assert all(torch.isfinite(torch.as_tensor(loss)) for _, loss in logged["loss/train/total"])


def test_configured_denoiser(run):
    """A trainer that is built from a configuration runs its own algorithm, callback and saver of checkpoints."""
    pytest.importorskip("omegaconf", reason="OmegaConf is in the test group")
    config = Path(__file__).parent / "from_composer" / "denoiser.yaml"

    trainer = run("configured_denoiser.py", "--config", config, "trainer.max_duration=8ba")["trainer"]

    names = [type(callback).__name__ for callback in trainer.state.callbacks]
    saver = trainer.state.callbacks[names.index("OwnSaver")]
    assert [Path(path).name for path in saver.saved] == ["ep0-ba4-rank0.pt", "ep1-ba8-rank0.pt"]
    assert (Path(saver.saved[1]).parent / "newest.symlink").read_text() == saver.saved[1]
    assert trainer.state.callbacks[names.index("PhaseMonitor")].phase.value == "clean"
    assert trainer.state.optimizers[0].param_groups[0]["betas"] == (0.9, 0.98)
    rates = [rate for _, rate in trainer.logger.destinations[0].data["mask/rate"]]
    assert rates[:2] == pytest.approx([0.9, 0.8])
    assert rates[-1] == pytest.approx(0.3)


@pytest.mark.filterwarnings(
    "ignore:MemoryMonitor logs nothing",
    "ignore:A run that is resumed",
    "ignore:a_package",
)
def test_chat_finetuning(run, tmp_path):
    """Packed chats are trained on with counts of tokens, and a second run continues from the file that was saved."""
    pytest.importorskip("transformers")

    variables = run("chat_finetuning.py", "--folder", tmp_path / "chats")

    (first, loader, budget, speed, memory), (second, *_) = variables["first"], variables["second"]
    batches = [*loader.dataloader]
    kinds = {
        kind: sum(loader.get_num_tokens_in_batch(batch, token_type=kind) for batch in batches)
        for kind in ("total", "loss_generating")
    }
    assert first.state.timestamp.batch == 8
    assert (budget.seen, budget.generating) == (kinds["total"], kinds["loss_generating"])
    assert first.state.timestamp.token == kinds["total"] > kinds["loss_generating"]
    assert speed.history_tokens[-1] == kinds["total"]
    assert memory.hyperparameters["time/remaining_estimate_unit"] == "minutes"
    assert {"throughput/tokens_per_sec", "metrics/held_out/LanguagePerplexity"} <= memory.data.keys()
    assert second.state.timestamp.batch == 16


def test_mpt_with_tasks(run):
    """A decoder is evaluated in context by metrics that take the batch, and a callback logs what they return."""
    variables = run("mpt_with_tasks.py", "--duration", "30ba", "--interval", "15ba")

    trainer, rows = variables["trainer"], variables["answers"].rows
    data = variables["memory"].data
    assert {"metrics/choices/2-shot/ChoiceAccuracy", "metrics/answers/0-shot/ExactAnswer"} <= data.keys()
    golds = [ast.literal_eval(values) for task, name, values in rows if (task, name) == ("choices/2-shot", "gold")]
    guesses = [ast.literal_eval(values) for task, name, values in rows if (task, name) == ("choices/2-shot", "guess")]
    half = len(golds) // 2
    pairs = zip(golds[half:], guesses[half:], strict=True)
    right = [one == other for pair in pairs for one, other in zip(*pair, strict=True)]
    accuracy = sum(right) / len(right)
    assert float(trainer.state.eval_metric_values["choices/2-shot"]["ChoiceAccuracy"]) == pytest.approx(accuracy)
    rates = [rate for _, rate in data["lr-AdamW/group0"]]
    assert rates[5] == pytest.approx(3e-3, rel=0.3)
    assert "answers" in variables["memory"].tables


@pytest.mark.filterwarnings(
    "ignore:LowPrecisionLayerNorm.* found nothing",
    "ignore:The saved state was loaded",
)
def test_bert_factories(run, tmp_path):
    """Factories build a run by names; callbacks read its losses and metrics, and its file is exported and continued."""
    pytest.importorskip("omegaconf", reason="OmegaConf is in the test group")
    (tmp_path / "tokenizer").mkdir()
    write_tiny_bert(tmp_path / "tokenizer")

    variables = run("bert_factories.py")

    first, second = variables["first"], variables["second"]
    counter, later = (
        next(one for one in trainer.state.callbacks if type(one).__name__ == "MaskedTokens")
        for trainer in (first, second)
    )
    assert counter.events[0] == "fit_start"
    assert counter.events[-1] == "fit_end"
    assert counter.events.count("batch_checkpoint") == 12
    logged = first.logger.destinations[0].data
    losses = [float(value) for _, value in logged["loss/train/total"]]
    assert [value for _, value in logged["loss/mean"]] == pytest.approx(losses)
    for name in ("LanguageCrossEntropy", "MaskedAccuracy"):
        at_end = [float(value) for _, value in logged[f"metrics/train/{name}"]]
        assert [value for _, value in logged[f"epoch/{name}"]] == pytest.approx(at_end)
    assert later.masked > counter.masked > 0
    assert (tmp_path / "pretrained" / "model.safetensors").exists()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_the_scan_finds_former_names_alone(program):
    """Everything that the scan finds works; with the advised imports in place of the former ones, it finds nothing."""
    source = program.read_text()

    findings = [one for one in scan_source(source) if not one.has_other_numbers]

    assert findings
    assert all(finding.works for finding in findings)
    lines = source.splitlines()
    for line in {finding.line for finding in findings}:
        changes = [one.change for one in findings if one.line == line and one.change.startswith("from ")]
        lines[line - 1] = "\n".join(changes)
    assert [one for one in scan_source("\n".join(lines)) if one.change.startswith("from ")] == []

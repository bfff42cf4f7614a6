"""Programs that were written for MosaicML Composer run unchanged.

The programs in ``from_composer`` use only Composer's names. They are new, and small data is drawn for them.
"""

import runpy
from pathlib import Path

import pytest
import torch

from composer.compat import scan_source

PROGRAMS = sorted((Path(__file__).parent / "from_composer").glob("*.py"))

pytestmark = pytest.mark.filterwarnings("ignore:composer\\..* is a former name:DeprecationWarning")


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

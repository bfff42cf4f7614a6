"""The quick start, run from the command line."""

import json
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "digits.py"
STEPS = 4  # an epoch


def run(*options):
    """Run the example in a new process."""
    return subprocess.run([sys.executable, EXAMPLE, *options], capture_output=True, text=True, check=False)


@pytest.fixture
def parse(monkeypatch, set_command, capsys):
    """Return a function that runs the example in this process with options that end it; returns status and output."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)

    def run_until_exit(*options):
        set_command(EXAMPLE, *options)
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        return caught.value.code, capsys.readouterr()

    return run_until_exit


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the output and folder of a short run with all algorithms.

    It takes more than 5 seconds: a new process imports matplotlib, scikit-learn, kornia and torch, and trains four
    networks.
    """
    folder = tmp_path_factory.mktemp("digits")
    result = run("--seeds", "2", "--epochs", "24", "--output", folder)
    assert result.returncode == 0, result.stderr
    return result, folder


class TestRun:
    def test_prints_lines_table_and_plan(self, finished):
        """The output has a line for each run, the table, and below it what runs at which event."""
        result, _ = finished

        runs = [line for line in result.stdout.splitlines() if "s of training" in line]
        assert [line.split(":")[0] for line in runs] == [
            f"{name}, seed {seed}" for seed in range(2) for name in ("baseline", "recipe")
        ]
        assert result.stderr == ""
        plan = result.stdout.rpartition("steps a")[2]
        for word in ("after_dataloader", "Augment", "BlurPool", "LabelSmoothing"):
            assert word in plan

    def test_leaves_metrics_of_every_run_as_json_lines(self, finished):
        """The file of each run has a JSON line for every batch, and the accuracy of every epoch."""
        _, folder = finished

        files = sorted(path.name for path in folder.glob("*.jsonl"))
        assert files == ["baseline-seed0.jsonl", "baseline-seed1.jsonl", "recipe-seed0.jsonl", "recipe-seed1.jsonl"]
        for name in files:
            text = (folder / name).read_text()
            lines = [json.loads(line) for line in text.splitlines()]
            assert len(lines) > 24 * STEPS
            assert text.count("loss/train/total") == 24 * STEPS
            assert text.count("metrics/eval/MulticlassAccuracy") == 24 // 8

    def test_the_interval_is_that_of_a_paired_t_test(self, finished):
        """With two seeds, 12.706 standard errors, relative to the baseline's mean errors."""
        _, folder = finished

        results = json.loads((folder / "results.json").read_text())
        baseline, recipe = (results[name]["errors"] for name in ("baseline", "recipe"))
        one, other = (100 * (a - b) / statistics.mean(baseline) for a, b in zip(baseline, recipe, strict=True))
        mean, half = (one + other) / 2, 12.7062 * abs(one - other) / 2
        expected = {"mean": mean, "low": mean - half, "high": mean + half}
        assert results["recipe"]["fewer_errors"] == pytest.approx(expected, rel=1e-4)

    def test_draws_a_picture(self, finished):
        """curves.png is an image that is not blank."""
        from matplotlib import image

        _, folder = finished

        picture = image.imread(folder / "curves.png")
        assert picture.shape[0] > 400
        assert picture.shape[1] > 1000
        assert picture.std() > 0.05


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--seeds", "0"], "argument --seeds: must be an integer of at least 1, got '0'"),
        (["--seconds", "-1"], "argument --seconds: must be an integer of at least 1, got '-1'"),
        (["--epochs", "many"], "argument --epochs: must be an integer of at least 1, got 'many'"),
        (["--methods", "BlurPool,Mixup"], "unknown method 'Mixup', choose from Augment, BlurPool"),
        (["--methods", "EMA,EMA"], "'EMA' is listed twice"),
        (["--methods", "Muon,CautiousUpdates"], "methods must set different arguments, got Muon, CautiousUpdates"),
        (["--output", str(EXAMPLE)], "cannot write into"),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
    ],
)
def test_bad_options_end_in_one_sentence(parse, options, sentence):
    """The error message is one line, without a traceback."""
    status, output = parse(*options)

    assert status == 2
    assert sentence in output.err
    assert len(output.err.splitlines()) == 1

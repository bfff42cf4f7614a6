"""The programs of ``examples/tasks`` train, and their numbers are those of another implementation.

Each program has a function ``main`` that returns what it has computed, and here a function ``check_NAME`` that computes
the metrics again from the predictions. The table of the tasks, ``docs/guides/tasks.md``, links each program.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from check_size import code_lines

pytest.importorskip("sklearn", reason="it has the data of the programs")

from sklearn import metrics as sklearn_metrics

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted((ROOT / "examples/tasks").glob("*.py"))


def run(path):
    """Import a program and return the result of its ``main``."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
class TestEachProgram:
    def test_numbers(self, path, tmp_path, monkeypatch):
        """The program runs in an empty folder, and the metrics it returns follow from its predictions."""
        monkeypatch.chdir(tmp_path)

        globals()[f"check_{path.stem}"](run(path))

    def test_length(self, path):
        """The program has at most 30 lines of code."""
        assert len(code_lines(path.read_text())) <= 30

    def test_is_in_the_table(self, path):
        """The page of the tasks links the program."""
        assert f"(../../examples/tasks/{path.name})" in (ROOT / "docs/guides/tasks.md").read_text()


def check_one_label(result):
    """Accuracy and cross entropy are those of scikit-learn, and most digits are recognized."""
    probabilities, targets, found = result["probabilities"], result["targets"], result["metrics"]

    accuracy = sklearn_metrics.accuracy_score(targets, probabilities.argmax(dim=1))
    assert accuracy > 0.9
    assert found["MulticlassAccuracy"].item() == pytest.approx(accuracy)
    of_targets = probabilities.numpy()[range(len(targets)), targets.numpy()]
    assert found["CrossEntropy"].item() == pytest.approx(-np.log(of_targets).mean(), rel=1e-4)

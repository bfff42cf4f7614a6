"""Runs in child processes, from the command line and after a study was killed."""

import contextlib
import io
from pathlib import Path

import pytest

from composer.ablation import Study
from composer.ablation.__main__ import main


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return the folder of a study that was run from a file, and what was printed."""
    folder = tmp_path_factory.mktemp("shell")
    (folder / "study.py").write_text(STUDY)
    options = ["--seeds", "1", "--arms", "each", "--processes", "2", "--folder", str(folder / "results")]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["run", str(folder / "study.py"), *options]) == 0
    return folder / "results", printed.getvalue()


@pytest.mark.slow
class TestCommandLine:
    def test_what_is_printed(self, ran):
        """The table is printed, with rough times; what the runs print is in a log of each run."""
        folder, printed = ran

        assert printed.startswith("eval/Accuracy (higher is better), 1 seed")
        assert "Times are rough" in printed
        (log,) = folder.glob("runs/baseline-??????-seed0/log.txt")
        assert "printed by the user" in log.read_text()

    def test_a_killed_process_is_a_failure(self, ran):
        """A run whose process is ended by the system fails with this reason; the others are measured."""
        baseline, killed = Study.load(ran[0]).rows

        assert baseline.runs == 1
        assert "SIGKILL, as the system does when memory is used up" in killed.failures[0][1]


STUDY = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import small_problem

metric = "eval/Accuracy"
algorithms = {{"killed": small_problem.Killed}}

def make_trainer(algorithms, seed, folder):
    print("printed by the user")
    return small_problem.make_trainer(algorithms, seed, save_folder=folder)
"""


@pytest.mark.slow
class TestContinuing:
    def test_killed_five_times(self, problem, forkserver, tmp_path):
        """A study that SIGKILL ends five times has each result of one without interruption, once."""
        path = tmp_path / "killed" / "results.jsonl"
        for _ in range(5):
            # A run has nine batches: the process is killed in the second run with this algorithm.
            process = forkserver.Process(target=problem.run_slow_study, args=(path.parent, 14))
            process.start()
            process.join()
            assert process.exitcode == -9

        problem.run_slow_study(path.parent)
        problem.run_slow_study(tmp_path / "uninterrupted")

        def table(folder):
            study = Study.load(folder)
            values = [(run.arm, run.seed, [value for _, value in run.curve]) for run in study.results]
            return sorted(values), [(row.label, row.metric, row.difference, row.adjusted_p) for row in study.rows]

        assert table(path.parent) == table(tmp_path / "uninterrupted")

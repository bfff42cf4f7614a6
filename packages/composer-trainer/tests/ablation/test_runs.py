"""Runs in child processes, on this machine and through executors. Each process imports torch, which takes seconds."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack

import pytest

from composer.ablation import ablate
from composer.ablation.__main__ import main


@pytest.mark.slow
class TestChildProcesses:
    def test_a_killed_process_is_a_failure(self, problem, tmp_path):
        """A run whose process is ended by the system fails with this reason; the others are measured."""
        study = ablate(
            problem.make_trainer,
            {"killed": problem.Killed},
            metric="eval/Accuracy",
            arms=["each"],
            seeds=1,
            folder=tmp_path,
            processes=2,
            progress_bar=False,
        )

        baseline, killed = study.rows
        assert baseline.runs == 1
        assert "SIGKILL, as the system does when memory is used up" in killed.failures[0][1]
        assert "Times are rough" in str(study)

    def test_command_line(self, tmp_path, capsys):
        """A study is a file; what its runs print is in a log of each run and not in the result."""
        (tmp_path / "one.py").write_text(STUDY)

        code = main(
            ["run", str(tmp_path / "one.py"), "--seeds", "1", "--arms", "baseline", "--folder", str(tmp_path / "a")]
        )

        assert code == 0
        assert "eval/Accuracy (higher is better), 1 seed" in capsys.readouterr().out
        (log,) = (tmp_path / "a").glob("runs/baseline-??????-seed0/log.txt")
        assert "printed by the user" in log.read_text()


STUDY = f"""
import sys
sys.path.insert(0, {str(__file__.rpartition("/")[0])!r})
import small_problem

metric = "eval/Accuracy"
algorithms = {{}}

def make_trainer(algorithms, seed, folder):
    print("printed by the user")
    return small_problem.make_trainer(algorithms, seed, save_folder=folder)
"""


@pytest.mark.slow
class TestExecutors:
    @pytest.mark.parametrize("kind", ["process pool", "dask"])
    def test_executors(self, problem, tmp_path, kind):
        """Runs are executed by the standard library's process pool, and by two workers of Dask."""
        with ExitStack() as stack:
            if kind == "dask":
                distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
                cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
                client = stack.enter_context(distributed.Client(stack.enter_context(cluster)))
                executor = stack.enter_context(client.get_executor())
            else:
                context = multiprocessing.get_context("forkserver")
                context.set_forkserver_preload(["composer.ablation"])
                executor = stack.enter_context(ProcessPoolExecutor(2, mp_context=context))

            study = ablate(
                problem.make_trainer,
                {"bonus": problem.Bonus},
                metric="eval/Accuracy",
                arms=["each"],
                seeds=1,
                folder=tmp_path,
                executor=executor,
                progress_bar=False,
            )

        assert study.rows[1].difference.mean == pytest.approx(0.25)
        assert study.settings.is_rough

"""Runs in child processes, on this machine and through executors. Each process imports torch, which takes seconds."""

import contextlib
import io
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

from composer.ablation import Study, ablate
from composer.ablation.__main__ import main


@pytest.fixture
def forkserver():
    """Return a context whose processes are copies of one that has imported what a study needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["composer.ablation", "torch._dynamo", "scipy.stats"])
    return context


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
class TestForks:
    """Runs are forks of an interpreter that has imported the modules of make_trainer, where this is possible."""

    @pytest.mark.parametrize("opened", ["None", "os.open(__file__, os.O_RDONLY)"])
    def test_each_run_is_isolated(self, problem, tmp_path, monkeypatch, opened):
        """No run sees what another has changed; forks would share a file that an import opens: they are not used."""
        (tmp_path / "users.py").write_text(f"import os\n\nOPENED = {opened}\n{MAKE_TRAINER}")
        monkeypatch.syspath_prepend(tmp_path)
        import users

        study = ablate(
            users.make_trainer,
            {"nothing": problem.Nothing, "bonus": problem.Bonus},
            metric="eval/Accuracy",
            arms=["each"],
            seeds=1,
            folder=tmp_path,
            progress_bar=False,
        )

        del sys.modules["users"]
        seen = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*-seed0/seen.json")]
        assert [(run["changed"], run["variable"]) for run in seen] == [([], None)] * 3
        assert len({run["process"] for run in seen}) == 3
        (parent,) = {run["parent"] for run in seen}
        if users.OPENED is None:
            assert parent != os.getpid()
        else:
            assert parent == os.getpid()
            os.close(users.OPENED)
        peaks = [run.memory for run in study.results]
        assert max(peaks) < 1.05 * min(peaks)


MAKE_TRAINER = """
import json
import pathlib
import small_problem

CHANGED = []

def make_trainer(algorithms, seed, folder):
    seen = {"process": os.getpid(), "parent": os.getppid(), "changed": CHANGED, "variable": os.getenv("CHANGED")}
    pathlib.Path(folder, "seen.json").write_text(json.dumps(seen))
    CHANGED.append(seed)
    os.environ["CHANGED"] = "1"
    return small_problem.make_trainer(algorithms, seed)
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


@pytest.mark.slow
class TestExecutors:
    @pytest.mark.parametrize("kind", ["process pool", "dask"])
    def test_executors(self, problem, forkserver, tmp_path, kind):
        """Runs are executed by the standard library's process pool, and by two workers of Dask."""
        with ExitStack() as stack:
            if kind == "dask":
                # Workers in this process, which need not import torch; jobs and results are sent over TCP.
                options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "protocol": "tcp://"}
                cluster = stack.enter_context(LocalCluster(**options, dashboard_address=None))
                executor = stack.enter_context(stack.enter_context(Client(cluster)).get_executor())
            else:
                executor = stack.enter_context(ProcessPoolExecutor(2, mp_context=forkserver))

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

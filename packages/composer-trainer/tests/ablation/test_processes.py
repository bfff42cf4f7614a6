"""The processes of runs, on this machine and through executors. Each new interpreter imports torch, which is slow."""

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec

import pytest
from distributed import Client, LocalCluster

from composer.ablation import ablate


@pytest.mark.slow
class TestForks:
    """Runs are forks of an interpreter that has imported the modules of make_trainer, where this is possible."""

    @pytest.mark.parametrize(
        "opened",
        [
            "None",
            pytest.param(
                "__import__('pyarrow') and None",
                marks=pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed"),
            ),
            "os.open(__file__, os.O_RDONLY)",
        ],
    )
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

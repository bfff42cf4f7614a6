"""Studies of a small problem, in this process or in child processes."""

import sys
from concurrent.futures import Executor, Future
from pathlib import Path

import pytest

from composer.ablation import ablate
from composer.ablation.results import Result
from composer.ablation.runs import measure


class InThisProcess(Executor):
    """Measures runs in this process: starting a new one takes seconds."""

    def __init__(self):
        self.jobs = []

    def submit(self, run, job):
        self.jobs.append(job)
        future = Future()
        try:
            measured = measure(job)
            measured["curve"] = tuple(map(tuple, measured["curve"]))
            future.set_result(Result(job.arm, job.seed, wall_seconds=0.1, **measured))
        except Exception as error:  # noqa: BLE001  (as executors do)
            future.set_exception(error)
        return future


@pytest.fixture
def problem(monkeypatch):
    """Return the module with the small problem."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import small_problem

    yield small_problem
    del sys.modules["small_problem"]


@pytest.fixture
def study(problem, tmp_path):
    """Return a function that runs a study in this process."""

    def run(algorithms, make_trainer=problem.make_trainer, **options):
        settings = {
            "metric": "eval/Accuracy",
            "seeds": 2,
            "folder": tmp_path / "study",
            "executor": InThisProcess(),
            "progress_bar": False,
        }
        return ablate(make_trainer, algorithms, **settings | options)

    return run

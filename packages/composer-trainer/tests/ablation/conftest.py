"""Studies of a small problem, in this process or in child processes."""

import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from composer.ablation import ablate
from composer.ablation.results import ResultsFile
from composer.ablation.runs import measure
from fixtures.studies import SETTINGS, runs


class InThisProcess(ThreadPoolExecutor):
    """Measures runs in this process, one at a time: starting a new one takes seconds."""

    def __init__(self):
        super().__init__(max_workers=1)

    def submit(self, run, job, *forks):
        return super().submit(measure_here, job)


def measure_here(job):
    return measure(job)


@pytest.fixture
def in_this_process():
    """Return the class of an executor in this process."""
    return InThisProcess


@pytest.fixture
def forkserver():
    """Return a context whose processes are copies of one that has imported what a study needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["composer.ablation", "torch._dynamo", "scipy.stats"])
    return context


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
        # Leaving the executor waits for runs that an error of the study has left: they draw from the global generator.
        with InThisProcess() as executor:
            settings = {
                "metric": "eval/Accuracy",
                "seeds": 2,
                "folder": tmp_path / "study",
                "executor": executor,
                "progress_bar": False,
            }
            return ablate(make_trainer, algorithms, **settings | options)

    return run


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a stored study."""
    file = ResultsFile(tmp_path / "results.jsonl")
    file.append("settings", SETTINGS)
    for result in runs():
        file.append("result", result)
    return tmp_path

"""The law: a run that is stopped and resumed is bit-identical to an uninterrupted one, with the loaders people use.

Each pair of loader, workers and stop is tested; with ``RESUME_MATRIX=all`` in the environment, all three together.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from fixtures.processes import run_processes
from laws.loaders import LOADERS
from laws.program import FOREIGN, check

ALL = os.environ.get("RESUME_MATRIX") == "all"
pytestmark = [pytest.mark.filterwarnings(f"ignore:.*{text}") for text in FOREIGN]
pytestmark.append(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))  # WebDataset's files
STOPS = {
    "batch": (["3ba"], {}),
    "epoch": (["1ep"], {}),
    "evaluation": (["evaluation"], {}),
    "second epoch": (["13ba"], {}),
    "subset": (["3ba", "5ba", "7ba"], {"train_subset_num_batches": 5}),
    "microbatches": (["3ba"], {"device_train_microbatch_size": 3}),
    "file": (["3ba", "1ep"], {"save_filename": "ep{epoch}-ba{batch}-rank{rank}.pt"}),
}
EXACT = [name for name in LOADERS if name != "webdataset_that_counts"]
CASES = [
    (name, workers, stop)
    for place, name in enumerate(EXACT)
    for number, stop in enumerate(STOPS)
    for workers in (0, 2)
    if ALL or (place + number + workers // 2) % 2 == 0
]


def need(name):
    """Skip a loader whose library is not installed."""
    module = {"hugging_face": "datasets"}.get(name, name)
    if module not in ("map_style", "iterable") and not importlib.util.find_spec(module):
        pytest.skip(f"needs {module}: mosaicml-streaming is in the session `streaming`, the others in the test group")


@pytest.mark.parametrize(("name", "workers", "stop"), CASES)
def test_a_stopped_run_continues_as_one_that_was_not(name, workers, stop, tmp_path):
    """Batches, weights and optimizers are equal bit for bit, wherever the run stops."""
    need(name)
    stops, settings = STOPS[stop]

    check(tmp_path, name, workers, stops, **settings)


def test_a_shuffle_that_counts_the_epochs_itself_is_not_exact(tmp_path):
    """No state contains the count of WebDataset's shuffle: it needs ``set_epoch``, as the loader ``webdataset`` has."""
    need("webdataset")

    with pytest.raises(AssertionError, match="differs from that of the uninterrupted run"):
        check(tmp_path, "webdataset_that_counts", 0, ["1ep"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), sorted({case[:2] for case in CASES if ALL or case[2] == "batch"}))
def test_two_processes(name, workers, tmp_path):
    """Each of two processes has its batches, also after a stop within, between and in the second of two epochs."""
    need(name)

    outputs = run_processes(Path(__file__).with_name("program.py"), 2, tmp_path, name, workers, "3ba", "1ep", "7ba")

    assert all("exact" in output for output in outputs)

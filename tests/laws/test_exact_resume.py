"""The law: a run that is stopped and resumed is bit-identical to an uninterrupted one, with the loaders people use."""

import importlib.util
from pathlib import Path

import pytest

from fixtures.processes import run_processes
from laws.loaders import LOADERS
from laws.program import FOREIGN, check

pytestmark = [pytest.mark.filterwarnings(f"ignore:.*{text}") for text in FOREIGN]
pytestmark.append(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))  # WebDataset's files
NOT_EXACT = {
    ("webdataset_that_counts", 0): (
        "its shuffle counts the epochs in an attribute that no state contains; add set_epoch, as `webdataset` does"
    ),
}
"""Loader and workers of what does not resume exactly after the first epoch, with the reason."""
STOPS = {
    "batch": (["3ba"], {}),
    "epoch": (["1ep"], {}),
    "evaluation": (["evaluation"], {}),
    "second epoch": (["13ba"], {}),
    "subset": (["3ba", "5ba", "7ba"], {"train_subset_num_batches": 5}),
    "microbatches": (["3ba"], {"device_train_microbatch_size": 3}),
}


@pytest.fixture(autouse=True)
def library(request):
    """Skip loaders whose library is not installed."""
    name = request.node.callspec.params["name"]
    module = {"hugging_face": "datasets", "webdataset_that_counts": "webdataset"}.get(name, name)
    if module not in ("map_style", "iterable") and not importlib.util.find_spec(module):
        pytest.skip(f"needs {module}: mosaicml-streaming is in the session `streaming`, the others in the test group")


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_a_stopped_run_continues_as_one_that_was_not(name, workers, stop, tmp_path):
    """Batches, weights and optimizers are equal bit for bit, wherever the run stops."""
    stops, settings = STOPS[stop]

    if (reason := NOT_EXACT.get((name, workers))) and stop not in ("batch", "microbatches"):
        with pytest.raises(AssertionError, match="differs from that of the uninterrupted run"):
            check(tmp_path, name, workers, stops, **settings)
        pytest.xfail(reason)
    check(tmp_path, name, workers, stops, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", [name for name in LOADERS if name != "webdataset_that_counts"])
def test_two_processes(name, workers, tmp_path):
    """Each of two processes has its batches, also after a stop within, between and in the second of two epochs."""
    outputs = run_processes(Path(__file__).with_name("program.py"), 2, tmp_path, name, workers, "3ba", "1ep", "7ba")

    assert all("exact" in output for output in outputs)

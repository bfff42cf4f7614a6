"""A contrastive loss is that of the complete batch, whatever the processes and the parts of it."""

import json
from pathlib import Path

import pytest

from fixtures.processes import run_processes

PROGRAM = Path(__file__).with_name("contrastive_program.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of one process, and of the first of two."""
    folders = [tmp_path_factory.mktemp("contrastive") for _ in range(2)]
    for count, folder in enumerate(folders, start=1):
        run_processes(PROGRAM, count, folder)
    return [json.loads((folder / "0.json").read_text()) for folder in folders]


@pytest.mark.parametrize("case", ["views", "classes", "in parts"])
def test_gradients_of_two_processes(results, case):
    """Two processes with 5 and 9 samples have the loss and the gradients of one with 14."""
    one, two = results

    assert two[case] == pytest.approx(one[case], rel=0, abs=1e-12)


def test_gradients_in_parts(results):
    """Embeddings of two samples at a time have the gradients of all."""
    for each in results:
        assert each["in parts"] == pytest.approx(results[0]["views"], rel=0, abs=1e-12)


def test_training(results):
    """Training in two processes, and in microbatches, gives the weights of one process with complete batches."""
    one, two = results

    for other in (one["trained in parts"], two["trained"], two["trained in parts"]):
        assert other == pytest.approx(one["trained"], rel=0, abs=1e-11)


def test_loss_in_evaluation(results):
    """The loss of a model and its parts are those of all samples, in one process and in two."""
    one, two = results

    assert two["evaluated"] == pytest.approx(one["evaluated"], rel=1e-6)
    assert one["evaluated"][0] == pytest.approx(sum(one["evaluated"][1:]), rel=1e-6)

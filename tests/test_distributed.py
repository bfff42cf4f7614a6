"""The Trainer in two processes produces the same results as in one."""

import json
from pathlib import Path

import pytest

from fixtures.processes import run_processes

PROGRAM = Path(__file__).with_name("distributed_training.py")
RUNS = [
    "ddp",
    "microbatches",
    "forced",
    "multi",
    "fsdp",
    "fsdp, microbatches",
    "algorithms",
    "fsdp, algorithms",
    "SWA",
    "fsdp, SWA",
    "freezing",
    "line search",
    "growth",
    "fsdp, growth before",
    "class weights, microbatches",
    "sum",
    "sum, microbatches",
    "class weights",
]


def launch(folder, count):
    """Run the program and return the results that each process wrote."""
    run_processes(PROGRAM, count, folder, timeout=600)
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The results of one process with complete batches."""
    [result] = launch(tmp_path_factory.mktemp("alone"), 1)
    return result


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The results of two processes with half of each batch.

    Both fixtures take more than 5 seconds: they start processes that train each of ``RUNS``, once for all tests.
    """
    return launch(tmp_path_factory.mktemp("together"), 2)


@pytest.mark.slow
class TestTwoProcesses:
    @pytest.mark.parametrize("run", RUNS)
    def test_weights_are_those_of_one(self, alone, together, run):
        """The weights are equal up to rounding, despite different initial weights, and identical in both processes."""
        complete = alone[run.removesuffix(", microbatches")]
        expected = pytest.approx(complete["weights"], rel=1e-12, abs=1e-14)
        assert together[0][run]["weights"] == expected
        assert together[0][run]["weights"] == together[1][run]["weights"]

    @pytest.mark.parametrize("run", RUNS)
    def test_losses_and_clocks_are_those_of_one(self, alone, together, run):
        """Logged losses and the numbers of batches and samples are those of all processes together."""
        for result in together:
            complete = alone[run.removesuffix(", microbatches")]
            assert result[run]["losses"] == pytest.approx(complete["losses"], rel=1e-12)
            assert result[run]["clock"] == alone[run]["clock"] == [9, 36]

    @pytest.mark.parametrize("run", RUNS)
    def test_metrics_are_those_of_one(self, alone, together, run):
        """Of seven evaluation samples, two processes get one twice and count it once."""
        for result in together:
            assert result[run]["train metric"] == pytest.approx(alone[run]["train metric"])
            assert result[run]["eval metrics"] == pytest.approx(alone[run]["eval metrics"], rel=1e-5)

    def test_every_run_is_tested(self, alone):
        """All runs of the program are tested, and different runs have different weights."""
        assert [name for name in alone if name != "augmented"] == RUNS
        assert alone["freezing"]["weights"] != alone["ddp"]["weights"] != alone["algorithms"]["weights"]
        assert len(alone["growth"]["weights"]) == len(alone["ddp"]["weights"]) + 4 * 144

    def test_one_stops_all(self, together):
        """After a SIGTERM to one process in the third batch, both stop before the evaluation that follows."""
        assert [result["stopped"] for result in together] == [[3, 0], [3, 0]]

    def test_one_stops_all_without_evaluation(self, together):
        """Without an evaluation, both stop after the same batch, one of the following 17."""
        first, second = (result["stopped later"] for result in together)

        assert first == second
        assert 3 < first[0] <= 3 + 17

    def test_one_stops_the_evaluation_of_all(self, together):
        """After a SIGTERM to one process in an evaluation, both stop, and resume with the evaluation."""
        for result in together:
            stopped, resumed, uninterrupted = result["stopped in an evaluation"]
            assert (stopped["batch"], stopped["evaluations"]) == (3, [])
            assert resumed == uninterrupted
            assert [batch for batch, _ in resumed["evaluations"]] == [3, 6, 9]

    def test_an_export_that_fails_in_one_process(self, together):
        """The first process exports, and its error is raised in both."""
        assert [result["failed export"] for result in together] == [
            "ValueError: broken",
            "RuntimeError: Exporting the model failed in process 0: ValueError: broken.",
        ]

    def test_clocks_agree(self, together):
        """A training of two seconds ends after the same batch in both processes."""
        first, second = (result["by time"] for result in together)

        assert first == second
        assert first[1] >= 2

    @pytest.mark.parametrize("kind", ["samples", "loss terms", "search"])
    def test_seconds_of_batches_that_are_computed_twice(self, together, kind):
        """The clock counts the time of a batch once, also if the processes exchange nothing in between."""
        counted, passed, durations = zip(*(result["computed twice"][kind] for result in together), strict=True)

        assert 0.9 * min(passed) < min(counted)
        assert max(counted) < max(durations)

    def test_resume_is_exact(self, together):
        """A run resumed within an epoch restores the draws, metrics and data position of each process."""
        for result in together:
            uninterrupted, resumed = result["resumed"]
            assert resumed == uninterrupted
            assert uninterrupted["saved"] == "ep3"

    def test_augmentations_are_keyed_by_rank(self, alone, together):
        """Each process augments the same images differently, reproducibly, and rank 0 as a single process does."""
        (first, first_again), (second, second_again) = (result["augmented"] for result in together)

        assert len(first) == len(second) == 2
        assert all(one != other for one, other in zip(first, second, strict=True))
        assert first[0] != first[1]
        assert (first_again, second_again) == (first, second)
        assert alone["augmented"][0][:2] == first

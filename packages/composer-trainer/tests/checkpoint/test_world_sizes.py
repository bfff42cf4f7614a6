"""A training of two processes resumes in four and in one, with the same global batches."""

import json

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_program):
    """The folder of the program, which takes more than 5 seconds: it trains in three groups of processes."""
    path = tmp_path_factory.mktemp("world_sizes")
    run_program("world_sizes_program.py", path)
    return path


def result(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("world_size", [4, 1])
@pytest.mark.parametrize("place", ["ep1-ba6", "ep1-ba8"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
class TestOtherNumbersOfProcesses:
    def test_weights(self, folder, kind, place, world_size):
        """The weights are those of the uninterrupted training, up to rounding."""
        expected, found = (
            result(folder, "train-2-0")[kind],
            result(folder, f"resume-{world_size}-0")[f"{kind}, {place}"],
        )
        assert found["weights"] == pytest.approx(expected["weights"], rel=1e-12, abs=1e-14)

    def test_clock_and_metrics(self, folder, kind, place, world_size):
        """Samples are counted once, and the metric of the interrupted epoch has all of its samples."""
        expected, found = (
            result(folder, "train-2-0")[kind],
            result(folder, f"resume-{world_size}-0")[f"{kind}, {place}"],
        )
        assert found["clock"] == expected["clock"] == [12, 138, 3]
        assert found["metrics"] == expected["metrics"]

    def test_warning(self, folder, kind, place, world_size):
        """One warning tells what differs, and that the global batches are the same."""
        [text] = result(folder, f"resume-{world_size}-0")[f"{kind}, {place}"]["warnings"]
        assert f"saved by 2 processes, and {world_size} resume from it" in text
        assert "the global batches are the same" in text

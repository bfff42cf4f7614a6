"""A training in one, two or four processes has the same global batches, also if it resumes in another number."""

import json
import math

import pytest

UNEVEN = [(samples, batch, processes) for samples in (21, 22) for batch in (8, 20) for processes in (2, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_program):
    """The folder of the program, which takes more than 10 seconds: it trains in twelve groups of processes."""
    path = tmp_path_factory.mktemp("world_sizes")
    run_program("world_sizes_program.py", path)
    return path


def result(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.slow
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
        """Samples are counted once, and the metric of the next epoch has all of its samples."""
        expected, found = (
            result(folder, "train-2-0")[kind],
            result(folder, f"resume-{world_size}-0")[f"{kind}, {place}"],
        )
        assert found["clock"] == expected["clock"] == [12, 138, 3]
        assert found["metrics"][-1] == expected["metrics"][-1]

    def test_warning(self, folder, kind, place, world_size):
        """One warning tells what differs, and that no sample is left out or repeated."""
        [text] = result(folder, f"resume-{world_size}-0")[f"{kind}, {place}"]["warnings"]
        assert f"saved by 2 processes, and {world_size} resume from it: random draws differ" in text
        assert "training metrics of the epoch start again, and the epoch continues with its next sample" in text


@pytest.mark.parametrize("world_size", [4, 2, 1])
class TestOtherBatchSizes:
    """A run of two processes stops after 24 of 46 samples of an epoch, and resumes with other batches."""

    @pytest.mark.parametrize("size", [8, 12])
    @pytest.mark.parametrize("drops", [False, True])
    def test_each_sample_once(self, folder, world_size, size, drops):
        """The epoch continues with its next sample, until no complete batch is left if incomplete ones are dropped."""
        before = [result(folder, f"begin_numbered-2-{rank}")["samples"]["0"] for rank in (0, 1)]
        runs = [
            result(folder, f"resume_numbered-{world_size}-{rank}")[f"{size}, {drops}"] for rank in range(world_size)
        ]
        after = [samples for run in runs for samples in run["samples"]["0"]]
        second = [samples for run in runs for samples in run["samples"]["1"]]
        rest = 22 - 22 % size if drops else 22
        complete = 46 - 46 % size if drops else 46

        assert len(after) == rest
        assert len({*before[0], *before[1], *after}) == 24 + rest
        assert len(second) == len({*second}) == complete
        assert [run["clock"] for run in runs] == [
            [2 + math.ceil(rest / size) + math.ceil(complete / size), 24 + rest + complete, 2]
        ] * world_size

    def test_draws_are_new(self, folder, world_size):
        """Layers that draw from the global generators do not draw the numbers of the first batches again."""
        first = result(folder, "begin_numbered-2-0")["draws"]
        resumed = result(folder, f"resume_numbered-{world_size}-0")["12, False"]["draws"]

        assert not {*first} & {*resumed}


@pytest.mark.parametrize(("samples", "global_batch", "world_size"), UNEVEN)
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "selective", "selective, fsdp"])
class TestUnevenLastBatch:
    """The last global batch has 1, 2, 5 or 6 samples; with 1 or 2, some processes get none of them.

    With ``SelectiveBackprop(scope="global")``, all processes together train on the samples that one process selects.
    """

    def test_weights(self, folder, kind, samples, global_batch, world_size):
        """After four epochs, the weights in each process are those of one process, up to rounding."""
        name = f"{kind}, {samples}, {global_batch}"
        expected = result(folder, "uneven-1-0")[name]["weights"]

        for rank in range(world_size):
            found = result(folder, f"uneven-{world_size}-{rank}")[name]["weights"]
            assert found == pytest.approx(expected, rel=0, abs=1e-12)

    def test_clock_and_metrics(self, folder, kind, samples, global_batch, world_size):
        """Each sample is counted once in an epoch, on the clock and in the metric."""
        name, batches = f"{kind}, {samples}, {global_batch}", -(-samples // global_batch)
        expected = result(folder, "uneven-1-0")[name]["metrics"]

        for rank in range(world_size):
            found = result(folder, f"uneven-{world_size}-{rank}")[name]
            assert found["clock"] == [4 * batches, 4 * samples, 4]
            assert found["metrics"] == pytest.approx(expected, abs=1e-7)


def test_stream_in_another_number_of_processes(folder):
    """A stream that resumes in another number of processes gives one warning, as its split may have changed."""
    [text] = result(folder, "stream-4-0")
    assert "saved by 2 processes, and 4 resume from it" in text
    assert "the current epoch may repeat samples and skip others" in text
    assert "use sampler=composer.distributed.get_sampler(data, shuffle=True) in every run, also in one of" in text

"""The Trainer in four processes: each sample once, streams that differ, and one checkpoint for all."""

import pytest


class TestSamples:
    @pytest.mark.parametrize(
        ("run", "first", "rest"),
        [
            ("some have nothing", 20, 2),
            ("some have less", 16, 6),
            ("shuffled", 20, 2),
            ("microbatches", 16, 6),
            ("dropped", 20, 0),
        ],
    )
    def test_each_sample_is_trained_once_in_an_epoch(self, four_processes, run, first, rest):
        """Of 22 samples in two batches, each number loses what one sample in its whole batch does."""
        expected = [1 / rest if rest else 0.0] * (22 - first) + [1 / first] * first

        for result in four_processes:
            for lost in result["samples"][run]["lost"]:
                assert sorted(lost) == pytest.approx(sorted(expected), abs=1e-12)

    @pytest.mark.parametrize(
        ("run", "clock"),
        [
            ("some have nothing", [2, 4, 44]),
            ("some have less", [2, 4, 44]),
            ("microbatches", [2, 4, 44]),
            ("dropped", [2, 2, 40]),
        ],
    )
    def test_each_sample_is_counted_once_in_an_epoch(self, four_processes, run, clock):
        """Epochs, batches and samples on the clock are those of the data, in every process."""
        assert [result["samples"][run]["clock"] for result in four_processes] == [clock] * 4

    def test_the_loss_is_that_of_real_samples(self, four_processes):
        """In the second batch, processes 0 and 1 have samples 20 and 21, and repeats of 0 and 1 count nothing."""
        for result in four_processes:
            assert result["samples"]["some have nothing"]["losses"][:2] == pytest.approx([9.5, 20.5])

    def test_nothing_is_warned_of(self, four_processes):
        """What is dealt out by get_sampler is right."""
        runs = [run for result in four_processes for run in result["samples"].values()]

        assert [run["warnings"] for run in runs] == [[]] * len(runs)


class TestOrder:
    def test_the_seed_decides(self, four_processes):
        """Runs of another seed have another order, and runs of the same seed the same."""
        for result in four_processes:
            first, other, again = result["order"]
            assert first == again != other

    def test_processes_share_one_order(self, four_processes):
        """Whatever generators their loaders have, no sample is in the first batches of two processes."""
        for run in range(3):
            dealt = [sample for result in four_processes for sample in result["order"][run]]
            assert len(set(dealt)) == len(dealt) == 20


class TestStreams:
    def test_a_split_stream_is_trained_once(self, four_processes):
        """A stream that yields its process's part is trained on without a warning."""
        for result in four_processes:
            assert (result["streams"]["split"]["clock"], result["streams"]["split"]["warnings"]) == ([2, 6, 40], [])

    def test_a_stream_that_is_not_split_is_warned_of(self, four_processes):
        """Once, with what to do."""
        for result in four_processes:
            [warning] = result["streams"]["not split"]["warnings"]
            assert "gave all 4 processes the same first batch" in warning
            assert "itertools.islice(samples, composer.distributed.get_global_rank(), None" in warning

    def test_unequal_streams_end_together(self, four_processes):
        """The epoch ends in all processes where the shortest streams do, and which those are is reported."""
        for result in four_processes:
            unequal = result["streams"]["unequal"]
            assert unequal["clock"] == [2, 4, 32]
            assert [warning.partition(":")[0] for warning in unequal["warnings"]] == [
                "train_dataloader ended after 2 batches in processes 1, 2 and has more in the other processes"
            ] * 2


class TestOneCheckpoint:
    @pytest.mark.parametrize("case", ["together", "by rank", "load_path"])
    def test_rank_zero_chooses(self, four_processes, case):
        """All go on from the same batch of the same checkpoint, whatever folder the others were given."""
        assert [result["resuming"][case] for result in four_processes] == [[2]] * 4

    def test_progress_that_rank_zero_does_not_see_is_an_error(self, four_processes):
        """Instead of starting a new run beside a saved one, every process says who sees which checkpoint."""
        [message] = {result["resuming"]["only others"] for result in four_processes}

        assert message.startswith("CheckpointError: ")
        assert "shared/ep1-ba2 is seen by process 1 (host " in message
        assert "and process 0 has no checkpoint. Let save_folder be on storage that all processes share." in message

    def test_another_checkpoint_of_the_same_name_is_an_error(self, four_processes):
        """As where each machine has a disk of its own: the manifests differ, and every process says so."""
        [message] = {result["own disks"][0] for result in four_processes}

        assert "shared/ep1-ba2 is what process 0 loads, and process 3 (host " in message
        assert "does not see it: it has another manifest there." in message

    def test_arguments_must_agree(self, four_processes):
        """A load_path that one process lacks would let the others wait."""
        [message] = {result["resuming"]["not everywhere"] for result in four_processes}

        assert "load_path, load_weights_only and autoresume must be the same in every process" in message

    def test_a_failure_is_that_of_all(self, four_processes):
        """The process that failed raises its own error, the others name it."""
        reported = [result["failing"] for result in four_processes]

        other = "RuntimeError: Reading failed in process 2: KeyError: 'settings'"
        assert reported == [other, other, "KeyError: 'settings'", other]

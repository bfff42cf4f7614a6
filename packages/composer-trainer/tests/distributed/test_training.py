"""The Trainer in four processes: each sample once, streams, and one checkpoint."""

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
        """Of 22 samples in two batches, each number's loss is that of one sample in its complete batch."""
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
        """In the second batch, processes 0 and 1 have samples 20 and 21, and repeated samples are excluded."""
        for result in four_processes:
            assert result["samples"]["some have nothing"]["losses"][:2] == pytest.approx([9.5, 20.5])

    def test_does_not_warn(self, four_processes):
        """Data sampled by get_sampler give no warning."""
        runs = [run for result in four_processes for run in result["samples"].values()]

        assert [run["warnings"] for run in runs] == [[]] * len(runs)


class TestOrder:
    def test_order_depends_on_the_seed(self, four_processes):
        """Equal seeds give equal orders, other seeds do not."""
        for result in four_processes:
            first, other, again = result["order"]
            assert first == again != other

    def test_processes_share_one_order(self, four_processes):
        """For any loader generators, no sample is in the first batches of two processes."""
        for run in range(3):
            dealt = [sample for result in four_processes for sample in result["order"][run]]
            assert len(set(dealt)) == len(dealt) == 20


class TestStreams:
    def test_sharded_stream(self, four_processes):
        """A stream that yields its process's part is trained on without a warning."""
        for result in four_processes:
            assert (result["streams"]["split"]["clock"], result["streams"]["split"]["warnings"]) == ([2, 6, 40], [])

    def test_unsharded_stream_warns(self, four_processes):
        """The warning is given once, with the remedy."""
        for result in four_processes:
            [warning] = result["streams"]["not split"]["warnings"]
            assert "gave all 4 processes the same first batch" in warning
            assert "itertools.islice(samples, composer.distributed.get_data_rank(), None" in warning

    def test_unequal_streams_end_together(self, four_processes):
        """The epoch ends in all processes with the shortest streams, which are reported."""
        for result in four_processes:
            unequal = result["streams"]["unequal"]
            assert unequal["clock"] == [2, 4, 32]
            assert [warning.partition(":")[0] for warning in unequal["warnings"]] == [
                "train_dataloader ended after 2 batches in processes 1, 2 and has more in the other processes"
            ] * 2


class TestOneCheckpoint:
    @pytest.mark.parametrize("case", ["together", "by rank", "load_path"])
    def test_rank_zero_selects_the_checkpoint(self, four_processes, case):
        """All processes resume from the same batch of the same checkpoint, for any folders."""
        assert [result["resuming"][case] for result in four_processes] == [[2]] * 4

    def test_checkpoint_missing_on_rank_zero_raises(self, four_processes):
        """Every process reports which processes have which checkpoint."""
        [message] = {result["resuming"]["only others"] for result in four_processes}

        assert message.startswith("CheckpointError: ")
        assert "shared/ep1-ba2 is seen by process 1 (host " in message
        assert "and process 0 has no checkpoint. Let save_folder be on storage that all processes share." in message

    def test_different_checkpoints_of_one_name_raise(self, four_processes):
        """With separate disks, different manifests raise in every process."""
        [message] = {result["own disks"][0] for result in four_processes}

        assert "shared/ep1-ba2 is what process 0 loads, and process 3 (host " in message
        assert "does not see it: it has another manifest there." in message

    @pytest.mark.parametrize("case", ["not everywhere", "weights of some"])
    def test_different_load_arguments_raise(self, four_processes, case):
        """A load_path or load_weights_only that differs in one process raises."""
        [message] = {result["resuming"][case] for result in four_processes}

        assert "load_path, load_weights_only and autoresume must be the same in every process" in message

    def test_failure_is_raised_in_all_processes(self, four_processes):
        """The failed process raises its own error, the others name it."""
        reported = [result["failing"] for result in four_processes]

        other = "RuntimeError: Reading failed in process 2: KeyError: 'settings'"
        assert reported == [other, other, "KeyError: 'settings'", other]

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

    @pytest.mark.parametrize("run", ["terms", "terms in every second batch"])
    def test_terms_of_the_loss_weigh_as_samples_do(self, four_processes, run):
        """If there is one for each sample, counting them changes only rounding, as they are counted in 32 bits."""
        for result in four_processes:
            for lost, expected in zip(
                *(result["samples"][one]["lost"] for one in (run, "some have less")), strict=True
            ):
                assert lost == pytest.approx(expected, abs=1e-7)

    @pytest.mark.parametrize(("case", "batches"), [("never", 0), ("alone", 0), ("no longer", 2), ("later", 2)])
    def test_terms_in_some_processes_only_raise(self, four_processes, case, batches):
        """All processes raise the same error in the first such batch, and none waits for another."""
        [(error, counted)] = {tuple(result["terms"][case]) for result in four_processes}

        assert error.startswith("ValueError: count_loss_terms() of the model returned a number in some processes and")
        assert counted == batches

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
            assert "returned the same first batch in all 4 processes" in warning
            assert "itertools.islice(samples, composer.distributed.get_data_rank(), None" in warning

    @pytest.mark.parametrize(
        ("run", "own", "clock"),
        [
            ("unequal", (5, 2, 2, 5), [2, 6, 28]),
            ("batch sampler", (5, 2, 2, 5), [2, 6, 28]),
            ("announcing", (5, 2, 2, 5), [2, 6, 28]),
            ("empty", (0, 5, 5, 0), [2, 6, 20]),
            ("microbatches", (5, 2, 2, 5), [2, 6, 28]),
        ],
    )
    def test_unequal_streams_end_together(self, four_processes, run, own, clock):
        """All samples of the longest streams are trained on as by one process, and counted once."""
        expected = [0.0] * 22
        for start in (0, 2, 4):  # in each global batch the next two samples of each process
            batch = [rank + 4 * index for rank in range(4) for index in range(start, min(start + 2, own[rank]))]
            for sample in batch:
                expected[sample] = 1 / len(batch)

        for result in four_processes:
            found = result["streams"][run]
            assert found["clock"] == clock
            assert all("has a length of 1 batches and returned" in warning for warning in found["warnings"])
            assert len(found["warnings"]) == (run in {"announcing", "batch sampler"})
            for lost in found["lost"]:
                assert lost == pytest.approx(expected, abs=1e-12)

    def test_streams_of_unequal_lengths(self, four_processes):
        """The length of an epoch is that of the longest; batches that are repeated do not change in place."""
        for result in four_processes:
            found = result["streams"]["lengths"]
            assert (found["clock"], found["warnings"]) == ([2, 6, 16], [])
            assert [index for index, loss in enumerate(found["lost"][0]) if loss] == [8, 9, 10, 11, 12, 15, 16, 19]

    @pytest.mark.parametrize(("place", "batches"), [("ep0-ba2", 2), ("ep0-ba3", 3), ("ep1-ba5", 5)])
    @pytest.mark.parametrize("kind", ["stream", "stateful", "stateful with a length", "batch sampler", "announcing"])
    def test_resume_after_some_streams_have_ended(self, four_processes, kind, place, batches):
        """A resumed run has the same losses from there on, though some processes have no more batches."""
        for result in four_processes:
            found, expected = result["streams"]["resumed"][f"{kind}, {place}"], result["streams"]["unequal"]
            assert found["clock"] == expected["clock"]
            assert found["losses"] == expected["losses"][batches:]

    def test_evaluation_of_sharded_models(self, four_processes):
        """Processes with fewer batches take part in the forward passes of the others, and count none of them."""
        expected = [[2, [2]], [4, [2, 2]], [6, [2, 2, 2]], [0, []]]  # samples, and those of each batch
        assert [result["streams"]["evaluated"][:2] for result in four_processes] == expected

    def test_microbatches_in_an_evaluation_of_sharded_models(self, four_processes):
        """Processes with fewer microbatches take part in the forward passes of the others, and count none of them."""
        counted = [result["streams"]["evaluated"][2] for result in four_processes]

        # Samples of the sampled data, of the streams, of those where one process has a batch without samples, and of
        # the sampled data with three of each.
        assert counted == [[6, 1, 0, 18], [6, 3, 3, 18], [5, 5, 5, 15], [5, 0, 0, 15]]

    def test_repeats_that_cannot_be_removed_in_an_evaluation(self, four_processes):
        """Samples of a loader with its own iteration all count, with a warning."""
        for result in four_processes:
            counted, [warning] = result["streams"]["evaluated"][3:]
            assert counted == 6
            assert warning.startswith("2 samples of each epoch are evaluated twice")


class TestOneCheckpoint:
    @pytest.mark.parametrize("case", ["together", "by rank", "load_path"])
    def test_rank_zero_selects_the_checkpoint(self, four_processes, case):
        """All processes resume from the same batch of the same checkpoint, for any folders."""
        assert [result["resuming"][case] for result in four_processes] == [[2]] * 4

    def test_folder_that_rank_zero_cannot_read(self, four_processes):
        """Every process reports it, and none waits for another."""
        messages = [result["resuming"]["lost"] for result in four_processes]

        own = messages.pop(0)
        assert own == "CheckpointError: lost://run cannot be read: PermissionError: the key has expired"
        assert {*messages} == {f"RuntimeError: Looking for checkpoints failed in process 0: {own}."}

    def test_checkpoint_that_one_process_does_not_see(self, four_processes):
        """That process raises its own error, and the others name it."""
        messages = [result["resuming"]["not shared"] for result in four_processes]

        own = messages.pop(3)
        assert own == "MissingCheckpointError: memory://runs/ep1-ba2 does not exist."
        assert {*messages} == {f"CheckpointError: memory://runs/ep1-ba2 was not loaded: it failed in process 3: {own}"}

    def test_failure_is_raised_in_all_processes(self, four_processes):
        """The failed process raises its own error, the others name it."""
        reported = [result["failing"] for result in four_processes]

        other = "RuntimeError: Reading failed in process 2: KeyError: 'settings'."
        assert reported == [other, other, "KeyError: 'settings'", other]

    def test_ctrl_c_in_one_process_ends_all(self, four_processes):
        """The others do not wait for a process that was interrupted, and name it."""
        reported = [result["interrupted"] for result in four_processes]

        other = "RuntimeError: Reading failed in process 2: KeyboardInterrupt."
        assert reported == [other, other, "KeyboardInterrupt: ", other]

    def test_unusable_save_folder_is_reported_in_all_processes(self, four_processes):
        """The first process, which opens the folder, raises its error, and the others raise one that names it."""
        first, *others = [result["unusable"] for result in four_processes]

        assert "unusable" in first
        assert "failed in process 0" not in first
        for message in others:
            assert "Saving a checkpoint failed in process 0: " in message

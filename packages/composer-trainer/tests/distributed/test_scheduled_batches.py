"""Batches whose size follows a schedule: their samples, and exact resumes in one and two processes."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from composer.core import Time, Timestamp
from composer.distributed import ScheduledBatchSampler
from composer.loggers import InMemoryLogger
from composer.optim import LinearScheduler
from fixtures import small_run, trained, weights
from fixtures.data import vectors

SIZES = {"0ba": 2, "3ba": 4}
PLACES = ("ep0-ba2", "ep0-ba3", "ep0-ba4", "ep0-ba7", "ep1-ba8")


def sizes_of(sampler):
    return [len(batch) for batch in sampler]


class TestSizes:
    @pytest.mark.parametrize(
        ("sizes", "clock", "expected"),
        [
            ({"0ba": 4}, Timestamp(), [4, 4, 4, 4, 4]),
            ({"0ba": 2, "3ba": 4}, Timestamp(), [2, 2, 2, 4, 4, 4, 2]),
            ({"0ba": 2, "3ba": 4}, Timestamp(batch=2), [2, 4, 4, 4, 4, 2]),
            ({"0ba": 2, "3ba": 4}, Timestamp(batch=3), [4, 4, 4, 4, 4]),
            ({"0sp": 2, "5sp": 4}, Timestamp(), [2, 2, 2, 4, 4, 4, 2]),
            ({"0sp": 2, "5sp": 4}, Timestamp(sample=1), [2, 2, 4, 4, 4, 4]),
            ({"0ep": 5, "2ep": 10}, Timestamp(epoch=1, batch=7), [5, 5, 5, 5]),
            ({"0ep": 5, "2ep": 10}, Timestamp(epoch=2, batch=7), [10, 10]),
        ],
    )
    def test_follow_the_clock(self, sizes, clock, expected):
        """A batch has the size of the last time that is reached when it begins; the last one may be smaller."""
        sampler = ScheduledBatchSampler(range(20), sizes)

        sampler.begin_epoch(clock)

        assert sizes_of(sampler) == expected
        assert len(sampler) == len(expected)

    def test_size_at(self):
        """The size at a time is that of the batch after it."""
        sampler = ScheduledBatchSampler(range(20), {"0ba": 2, "3ba": 4})

        assert [sampler.size_at(Timestamp(batch=batch)) for batch in range(5)] == [2, 2, 2, 4, 4]

    @pytest.mark.parametrize(("drop_last", "expected"), [(False, 20), (True, 18)])
    def test_each_sample_comes_once(self, drop_last, expected):
        """Shuffled, no sample comes twice, and only those of an incomplete last batch are left out."""
        sampler = ScheduledBatchSampler(range(20), {"0ba": 3, "2ba": 6}, shuffle=True, drop_last=drop_last)

        samples = [sample for batch in sampler for sample in batch]

        assert len(samples) == len(set(samples)) == expected
        assert samples != sorted(samples)

    def test_another_epoch_has_another_order(self):
        """In a loop without Trainer, the order depends on the seed and the epoch."""
        first, other = (ScheduledBatchSampler(range(20), SIZES, shuffle=True, seed=seed) for seed in (0, 1))
        orders = [list(first), list(other)]
        first.begin_epoch(Timestamp(epoch=1))
        orders.append(list(first))

        assert orders[0] == list(ScheduledBatchSampler(range(20), SIZES, shuffle=True))
        assert orders[0] != orders[1] != orders[2] != orders[0]

    def test_processes_share_each_batch(self, monkeypatch):
        """Parts of three processes have equal sizes, and together the samples of one process."""
        alone = ScheduledBatchSampler(range(20), {"0ba": 3, "2ba": 6}, shuffle=True)
        complete = [set(batch) for batch in alone]
        monkeypatch.setenv("WORLD_SIZE", "3")
        parts = []
        for rank in range(3):
            monkeypatch.setenv("RANK", str(rank))
            parts.append(list(ScheduledBatchSampler(range(20), {"0ba": 3, "2ba": 6}, shuffle=True)))

        together = [set().union(*batches) for batches in zip(*parts, strict=True)]

        assert together == complete[:-1]  # of 20 samples, the last two cannot be shared
        assert all(len({len(part) for part in batches}) == 1 for batches in zip(*parts, strict=True))


class Stream(IterableDataset):
    """A stream of nothing."""

    def __iter__(self):
        return iter(())


class TestErrors:
    @pytest.mark.parametrize(
        ("sizes", "error", "message"),
        [
            ({}, TypeError, "sizes must map times to sizes"),
            ([4], TypeError, "sizes must map times to sizes"),
            ({"1ba": 4}, ValueError, r"increasing times from 0 on, .*, got 1ba\."),
            ({"0ba": 4, "3ba": 8, "2ba": 9}, ValueError, r"got 0ba, 3ba, 2ba\."),
            ({"0ba": 4, "3ep": 8}, ValueError, r"all in batches \('ba'\), samples \('sp'\) or epochs \('ep'\)"),
            ({"0tok": 4}, ValueError, r"got 0tok\."),
            ({"0dur": 4}, ValueError, r"got 0(\.0)?dur\."),
            ({"0ba": 0}, ValueError, "A size in sizes must be at least 1, got 0"),
            ({"0ba": 4.5}, TypeError, "A size in sizes must be an int, got 4.5"),
            ({0: 4}, TypeError, "A time in sizes must be a Time or a string"),
        ],
    )
    def test_wrong_sizes(self, sizes, error, message):
        """Wrong sizes and times raise at construction, with what they are."""
        with pytest.raises(error, match=message):
            ScheduledBatchSampler(range(8), sizes)

    def test_stream(self):
        """A data set without a length raises."""
        with pytest.raises(TypeError, match="dataset must have a length, got Stream"):
            ScheduledBatchSampler(Stream(), {"0ba": 4})

    def test_processes_must_share_evenly(self, monkeypatch):
        """A size that the processes cannot share raises."""
        monkeypatch.setenv("WORLD_SIZE", "3")

        with pytest.raises(ValueError, match="must be divisible by the number of processes, 3, got 8"):
            ScheduledBatchSampler(range(20), {"0ba": 6, "5ba": 8})

    def test_schedule_exceeds_the_training(self):
        """A size that no batch would have raises at the construction of the trainer."""
        data = vectors()
        loader = DataLoader(data, batch_sampler=ScheduledBatchSampler(data, {"0ba": 4, "10ba": 8}))

        with pytest.raises(ValueError, match="batches of 8 samples would begin at 10ba: train longer"):
            small_run(train_dataloader=loader, max_duration="10ba")
        with pytest.raises(ValueError, match="batches of 8 samples would begin at 10ba: train longer"):
            small_run(train_dataloader=None, max_duration="10ba").fit(train_dataloader=loader)

    def test_part_of_a_training_is_shorter(self):
        """A call of fit may end before the last size, as further ones may follow."""
        data = vectors()
        loader = DataLoader(data, batch_sampler=ScheduledBatchSampler(data, {"0ba": 4, "10ba": 8}))

        assert small_run(train_dataloader=None).fit(train_dataloader=loader, duration="2ba").steps == 2

    def test_a_duration_that_a_program_has_extended(self):
        """The end of the training is that of the state, not the one that the Trainer was constructed with."""
        data = vectors()
        loader = DataLoader(data, batch_sampler=ScheduledBatchSampler(data, {"0ba": 4, "10ba": 8}))
        trainer = small_run(train_dataloader=None, max_duration="10ba")
        trainer.state.max_duration = Time(12, "ba")

        assert trainer.fit(train_dataloader=loader).steps == 12

    def test_loader_that_saves_itself(self):
        """A loader that the clock does not reach raises."""

        class Stateful(DataLoader):
            def state_dict(self):
                return {}

            def load_state_dict(self, state):
                pass

        data = vectors()
        with pytest.raises(TypeError, match="requires the clock, which a Stateful would not give it"):
            small_run(train_dataloader=Stateful(data, batch_sampler=ScheduledBatchSampler(data, {"0ba": 4})))


class TestTraining:
    def test_sizes(self, scheduled):
        """Batches have the scheduled sizes, and each epoch has all samples."""
        batches = scheduled[0]["full"]["batches"]
        epochs = [sorted(itertools.chain(*part)) for part in (batches[:7], batches[7:])]

        assert [len(batch) for batch in batches] == [2, 2, 2, 4, 4, 4, 5, 8, 8, 7]
        assert epochs == [list(range(23))] * 2

    @pytest.mark.parametrize("place", [*PLACES, "workers"])
    def test_resume(self, scheduled, place):
        """Before, at and after a change of the size, a resumed run has bit-identical weights and the other batches."""
        full, resumed = scheduled[0]["full"], scheduled[0][place]

        assert resumed["weights"] == full["weights"]
        assert resumed["batches"] == full["batches"][resumed["done"] :]
        assert resumed["warnings"] == []

    def test_subset_of_batches(self):
        """With epochs of fewer batches, sizes still follow the clock."""
        data, sizes = vectors(), []
        loader = DataLoader(data, batch_sampler=ScheduledBatchSampler(data, {"0ba": 2, "3ba": 4}))
        trainer = small_run(train_dataloader=loader, train_subset_num_batches=2, max_duration="3ep")
        trainer.engine.on("batch_start", lambda state, logger: sizes.append(len(state.batch[0])))

        trainer.fit()

        assert sizes == [2, 2, 2, 4, 4, 4]

    def test_parts_of_a_training(self):
        """Calls of fit continue within an epoch; a reset clock starts the sizes again."""
        data, sizes = vectors(), []
        trainer = small_run(
            train_dataloader=DataLoader(data, batch_sampler=ScheduledBatchSampler(data, {"0ba": 2, "3ba": 4})),
        )
        trainer.engine.on("batch_start", lambda state, logger: sizes.append(len(state.batch[0])))

        trainer.fit(duration="2ba")
        trainer.fit(duration="3ba")
        trainer.fit(duration="3ba", reset_time=True)

        assert sizes == [2, 2, 2, 4, 4, 2, 2, 2]

    @pytest.mark.parametrize("schedule", [{"0ba": 2, "4ba": 5, "6ba": 8}, {"0sp": 2, "13sp": 5, "24sp": 8}])
    def test_resume_of_data_that_is_given_within_an_epoch(self, schedule, tmp_path):
        """Sizes follow the clock from the batch on at which other data was replaced, also in a resumed run."""
        data = vectors(40)

        def loader():
            return DataLoader(data, batch_sampler=ScheduledBatchSampler(data, schedule))

        sizes = [[], []]
        trainer = small_run(train_dataloader=DataLoader(data, batch_size=4))
        trainer.engine.on("batch_start", lambda state, logger: sizes[0].append(len(state.batch[0])))
        trainer.fit(duration="3ba")
        trainer.fit(train_dataloader=loader(), duration="2ba")
        path = trainer.save_checkpoint(tmp_path / "saved")
        trainer.fit(duration="4ba")
        resumed = small_run(train_dataloader=None, load_path=path)
        resumed.engine.on("batch_start", lambda state, logger: sizes[1].append(len(state.batch[0])))

        resumed.fit(train_dataloader=loader(), duration="4ba")

        assert sizes == [[4, 4, 4, 2, 5, 5, 8, 8, 8], [5, 8, 8, 8]]
        assert torch.equal(weights(trainer), weights(resumed))

    def test_rates_that_follow_the_size(self):
        """A schedule may read the size of the next batch."""
        data, rates = vectors(), []
        sampler = ScheduledBatchSampler(data, {"0ba": 2, "3ba": 8})
        linear = LinearScheduler()
        trainer = small_run(
            train_dataloader=DataLoader(data, batch_sampler=sampler),
            schedulers=lambda state, ssr=1.0: linear(state, ssr) * (sampler.size_at(state.timestamp) / 2) ** 0.5,
            max_duration="5ba",
        )
        trainer.engine.on("batch_start", lambda state, logger: rates.append(state.optimizers[0].param_groups[0]["lr"]))

        trainer.fit()

        assert rates == pytest.approx([0.1, 0.08, 0.06, 0.08, 0.04])

    def test_sizes_are_logged(self):
        """The hyperparameters of a run contain the sizes."""
        data, history = vectors(), InMemoryLogger()

        small_run(train_dataloader=DataLoader(data, batch_sampler=ScheduledBatchSampler(data, SIZES)), loggers=history)

        assert history.hyperparameters["train_dataloader"]["batch_sizes"] == {"0ba": 2, "3ba": 4}

    def test_microbatches(self):
        """Any split into microbatches gives the same steps."""
        data = vectors()

        def train(size):
            loader = DataLoader(data, batch_sampler=ScheduledBatchSampler(data, {"0ba": 2, "3ba": 8}))
            return weights(trained(train_dataloader=loader, device_train_microbatch_size=size))

        torch.testing.assert_close(train(2), train(None))


class TestProcesses:
    def test_batches_are_those_of_one_process(self, scheduled):
        """The two processes share the batches of one process, of which one sample of 23 cannot be shared."""
        alone, two, _ = scheduled
        parts = zip(*(result["full"]["batches"] for result in two), strict=True)
        together = [sorted([*first, *second]) for first, second in parts]

        assert [len(batch) for batch in together] == [2, 2, 2, 4, 4, 4, 4, 8, 8, 6]
        assert together[:6] == [sorted(batch) for batch in alone["full"]["batches"][:6]]

    def test_steps_are_those_of_one_process(self, scheduled):
        """After the complete batches of an epoch, weights are those of one process up to rounding."""
        alone, two, _ = scheduled

        for result in two:
            assert result["six batches"]["weights"] == pytest.approx(alone["six batches"]["weights"], rel=1e-12)

    @pytest.mark.parametrize("place", [*PLACES, "workers"])
    def test_resume(self, scheduled, place):
        """Two processes resume with bit-identical weights and the same batches, also with workers."""
        for result in scheduled[1]:
            assert result[place]["weights"] == result["full"]["weights"]
            assert result[place]["batches"] == result["full"]["batches"][result[place]["done"] :]
            assert result[place]["warnings"] == []

    def test_other_sizes_warn(self, scheduled):
        """Sizes that would have given other batches before the place warn."""
        for result in (scheduled[0], *scheduled[1]):
            [warning] = result["other"]["warnings"]
            assert "A ScheduledBatchSampler needs the same sizes up to this place." in warning

    @pytest.mark.parametrize("place", PLACES)
    def test_resume_in_one_process(self, scheduled, place):
        """One process continues an epoch with the next batch of two processes."""
        _, two, resumed = scheduled
        expected = [result["full"]["batches"][resumed[place]["done"]] for result in two]

        assert set(resumed[place]["batches"][0]) >= set(itertools.chain(*expected))
        [warning] = resumed[place]["warnings"]
        assert "the epoch continues with its next sample" in warning

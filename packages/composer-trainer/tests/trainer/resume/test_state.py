"""The trainer's additional saved state is checked before loading and used on resume."""

import json
import random
import warnings

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    get_worker_info,
)
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision
from torchmetrics.wrappers import ClasswiseWrapper

from composer.callbacks import CheckpointSaver
from composer.checkpoint import CheckpointMismatchError, save_checkpoint
from composer.core import Callback
from composer.core.saving.codec import plain
from composer.loggers import FileLogger, InMemoryLogger, TensorboardLogger
from composer.trainer.evaluation.metrics import load_metrics, save_metrics
from fixtures import make_classifier, small_run


class Seen(Callback):
    """Records the first number of each batch, and the clock after it."""

    def __init__(self):
        """Nothing yet."""
        self.batches = []

    def batch_end(self, state, logger):
        """Remember."""
        clock = state.timestamp
        self.batches.append((int(clock.epoch), int(clock.batch_in_epoch), int(state.batch[0][0, 0])))


class Drawing(Callback):
    """Has a generator."""

    def __init__(self, seed):
        """Seed it."""
        self.generator = torch.Generator().manual_seed(seed)


COUNTED = []


class Counting(Sampler):
    """A sampler whose order depends on a list in its module, which is not found."""

    def __iter__(self):
        """Begin one further on each time."""
        COUNTED.append(1)
        return iter([(place + len(COUNTED)) % 20 for place in range(20)])

    def __len__(self):
        """All."""
        return 20


class Endless(Counting):
    """The same, repeated forever, without a length."""

    def __iter__(self):
        """Never end."""
        while True:
            yield from super().__iter__()

    def __len__(self):
        """Raise, as torch's own samplers without a length do."""
        raise NotImplementedError


@pytest.fixture
def stopped(tmp_path):
    """Return the path of a checkpoint within the second epoch of five batches."""
    trainer = small_run(train_dataloader=plain_loader(), max_duration="8ba")
    trainer.fit()
    return trainer.save_checkpoint(str(tmp_path / "stopped"))


def plain_loader(kind=torch.utils.data.DataLoader, batch_size=4, samples=20, **options):
    inputs = torch.arange(4.0 * samples).reshape(samples, 4)
    return kind(TensorDataset(inputs, torch.zeros(samples, dtype=torch.int64)), batch_size=batch_size, **options)


class OnlyIterable:
    """A loader of twenty samples that is neither a list nor a DataLoader."""

    def __init__(self, batch_size):
        """With batches of this size."""
        self.size = batch_size

    def __iter__(self):
        """Iterate."""
        return iter(plain_loader(batch_size=self.size))


class Stateful(OnlyIterable):
    """The same with a state, and the states that were loaded."""

    def __init__(self, batch_size):
        """With none loaded."""
        super().__init__(batch_size)
        self.loaded = []

    def state_dict(self):
        """Save."""
        return {"rank": 0}

    def load_state_dict(self, state):
        """Note that it was called."""
        self.loaded.append(state)


class Split(IterableDataset):
    """Sixteen samples, of which each worker yields its part."""

    def __iter__(self):
        worker = get_worker_info()
        first, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter([(torch.full((4,), float(index)), index % 3) for index in range(first, 16, count)])


class TestCheck:
    @pytest.mark.parametrize(
        ("part", "value"),
        [
            ("clock_before", {}),
            ("clock_before", None),
            ("cooldown", "5ba"),
            ("cooldown", {"begin": "soon", "length": "5ba"}),
            ("interrupted", [1]),
            ("interrupted", {"at_night": ["eval"]}),
            ("skipped_steps", 7),
            ("skipped_steps", torch.zeros(2)),
            ("microbatch_size", "x"),
            ("process", 3),
            ("process", {}),
            ("world_size", "x"),
        ],
    )
    def test_invalid_state_raises(self, tmp_path, part, value):
        """An invalid state raises with its name before anything is loaded."""
        trainer = small_run(max_duration="1ep")
        extra = {**plain(trainer._resume_state.values()), part: value}
        path = save_checkpoint(trainer.state, tmp_path / "one", extra=extra)

        with pytest.raises(CheckpointMismatchError, match=rf"extra(\.|: ){part}"):
            small_run(max_duration="1ep", load_path=path)

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            ("data", 3),
            ("data.epoch", -1),
            ("data.place", "3"),
            ("data.global_batch_size", 0),
            ("data.length", "5"),
            ("data.order", 7),
            ("data.sizes", [3]),
            ("data.sizes.samples", "x"),
            ("data.parts", {"unknown": {}}),
            ("data.has_ended", 3),
            ("loggers", [3]),
            ("loggers.FileLogger", {}),
            ("loggers.FileLogger.path", 5),
            ("loggers.FileLogger.size", -5),
            ("loggers.TensorboardLogger", {}),
            ("loggers.TensorboardLogger.folder", 5),
            ("loggers.InMemoryLogger", {"path": "a"}),
            ("metrics", {"x": 3}),
            ("metrics.MulticlassAccuracy..updates", -1),
            ("metrics.MulticlassAccuracy..state.tp", "text"),
            ("metrics.MulticlassAccuracy..state.tp", torch.zeros(7)),
            ("objects", 3),
            ("objects.states", [3]),
            ("objects.generators", {"model": 3}),
            ("rng", 3),
            ("rng.python.version", 7),
            ("rng.python.version", "3"),
            ("rng.python.words", torch.zeros(3, dtype=torch.int64)),
            ("rng.python.words", torch.full((625,), -1)),
            ("rng.python.gauss", "x"),
            ("rng.torch.torch", torch.zeros(3, dtype=torch.uint8)),
            ("rng.torch.torch", torch.zeros(5056)),
            ("rng.numpy", 3),
            ("rng.numpy.bit_generator", "PCG64"),
            ("rng.numpy.state.key", [0, 0, 0]),
            ("rng.numpy.state.pos", 10**6),
        ],
    )
    def test_invalid_parts_raise(self, tmp_path, path, value):
        """Each part is checked, and the run does not change: weights, clock and generators."""
        first, own = (
            [FileLogger(str(tmp_path / "{run_name}.txt")), TensorboardLogger(str(tmp_path)), InMemoryLogger()]
            for _ in range(2)
        )
        trainer = small_run(run_name="a", train_metrics=MulticlassAccuracy(3), loggers=first, max_duration="1ep")
        extra = plain(trainer._resume_state.values())
        *outer, last = path.split(".")
        place = extra["process"]
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = value
        checkpoint = save_checkpoint(trainer.state, tmp_path / "one", extra=extra)
        model = make_classifier(seed=3, train_metrics=MulticlassAccuracy(3))
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}

        with pytest.raises(CheckpointMismatchError, match="nothing of it has been loaded"):
            small_run(run_name="b", loggers=own, model=model, max_duration="1ep", load_path=checkpoint)

        assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(7).get_state())  # the trainer's seed

    @pytest.mark.parametrize("part", ["algorithms", "callbacks", "extra", "rank_zero_seed", "scaler", "schedulers"])
    def test_part_that_was_not_saved(self, tmp_path, part):
        """A run resumes from a checkpoint that save_ignore_keys has left a part out of, with a warning."""
        small_run(max_duration="2ba", save_folder=tmp_path, save_ignore_keys=part).fit()

        with pytest.warns(UserWarning, match=f"was saved without {part}"):
            resumed = small_run(max_duration="4ba", load_path=tmp_path / "latest")

        assert resumed.fit().steps == 2


class TestAttach:
    def test_saver_that_is_added_later(self, tmp_path):
        """Training resumes from a checkpoint of a saver that was added after the Trainer was constructed."""
        trainer = small_run(max_duration="2ba")
        trainer.state.callbacks.append(CheckpointSaver(tmp_path, filename="added"))
        trainer.fit()

        resumed = small_run(max_duration="4ba", load_path=tmp_path / "added")

        assert resumed.fit().steps == 2


class TestResume:
    def test_part_of_the_data_that_is_ignored(self, stopped):
        """The error states that all of the data has to be ignored."""
        expected = r"extra: field 'process' is missing\. Ignore 'extra/process' only together with all of 'extra'\."
        with pytest.raises(CheckpointMismatchError, match=expected):
            small_run(max_duration="9ba", load_path=stopped, load_ignore_keys="extra/process")

    def test_ignored_data(self, stopped):
        """Without the data beside the state, a run continues with the first batch of an epoch."""
        recorder = Seen()
        options = {"max_duration": "9ba", "load_path": stopped, "load_ignore_keys": "extra", "callbacks": recorder}

        small_run(train_dataloader=plain_loader(), **options).fit()

        assert recorder.batches == [(1, 4, 0)]

    def test_ignored_clock(self, stopped):
        """A run that ignores the saved clock starts with a complete epoch."""
        recorder = Seen()

        small_run(
            train_dataloader=plain_loader(),
            max_duration="1ep",
            load_path=stopped,
            load_ignore_keys="timestamp",
            callbacks=[recorder],
        ).fit()

        assert recorder.batches == [(0, 1, 0), (0, 2, 16), (0, 3, 32), (0, 4, 48), (0, 5, 64)]

    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # of torchdata's own
    def test_new_stateful_loader(self, stopped):
        """A stateful loader that was not saved is fast-forwarded."""
        module = pytest.importorskip("torchdata.stateful_dataloader", reason="it is an optional loader")
        recorder = Seen()
        trainer = small_run(
            train_dataloader=plain_loader(module.StatefulDataLoader),
            max_duration="2ep",
            load_path=stopped,
            callbacks=[recorder],
        )

        with (
            pytest.warns(UserWarning, match="class: DataLoader was saved, StatefulDataLoader is set"),
            pytest.warns(UserWarning, match="first 3 batches are loaded again"),
        ):
            trainer.fit()

        assert recorder.batches == [(1, 4, 48), (1, 5, 64)]

    def test_position_beyond_the_epoch_raises(self, stopped):
        """The error states the likely reason."""
        with pytest.raises(
            CheckpointMismatchError, match=r"3 batches .* were done, and train_dataloader has 2\. .* same batch size"
        ):
            small_run(train_dataloader=plain_loader(batch_size=10), max_duration="2ep", load_path=stopped)

    @pytest.mark.parametrize(("batch_size", "length", "left"), [(5, 4, [(1, 4, 60)]), (7, 3, []), (3, 7, None)])
    def test_other_epoch_length_warns(self, stopped, batch_size, length, left):
        """A run resumes in an epoch of another length with a warning that samples differ."""
        recorder = Seen()
        options = {"max_duration": "2ep", "load_path": stopped, "callbacks": [recorder]}
        trainer = small_run(train_dataloader=plain_loader(batch_size=batch_size), **options)

        with pytest.warns(UserWarning, match=f"batches: 5 was saved, {length} is set"):
            trainer.fit()

        assert recorder.batches == (left or [(1, place, 12 * place - 12) for place in range(4, length + 1)])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"batch_size": 5, "samples": 25}, "samples a batch: 4 was saved, 5 is set"),
            ({"samples": 19}, "samples: 20 was saved, 19 is set"),
        ],
    )
    def test_other_batch_size_with_equal_length_warns(self, stopped, options, message):
        """Equal numbers of batches with another batch size or number of samples give a warning."""
        trainer = small_run(train_dataloader=plain_loader(**options), max_duration="2ep", load_path=stopped)

        with pytest.warns(UserWarning, match=f"train_dataloader.{message}"):
            trainer.fit()

    def test_other_number_of_workers_of_a_stream(self, tmp_path):
        """A stream is usually split over workers, so another number of them gives a warning; two workers are slow."""
        trainer = small_run(train_dataloader=DataLoader(Split(), batch_size=4, num_workers=2), max_duration="1ep")
        trainer.fit(duration="2ba")
        path = trainer.save_checkpoint(str(tmp_path / "one"))
        other = small_run(train_dataloader=DataLoader(Split(), batch_size=4), max_duration="1ep", load_path=path)

        with (
            pytest.warns(UserWarning, match="first 2 batches are loaded again"),
            pytest.warns(UserWarning, match="workers: 2 was saved, 1 is set"),
        ):
            other.fit()

    def test_subset_of_the_batches(self, stopped):
        """An epoch that ends earlier is one of the changed settings."""
        recorder = Seen()
        options = {"max_duration": "2ep", "load_path": stopped, "callbacks": [recorder]}

        with pytest.warns(UserWarning, match="subset_num_batches: -1 was saved, 4 is set"):
            small_run(train_dataloader=plain_loader(), train_subset_num_batches=4, **options).fit()

        assert recorder.batches == [(1, 4, 48)]

    def test_unreproducible_sampler_warns(self, tmp_path):
        """Indices in another order than before are detected."""
        first = small_run(train_dataloader=plain_loader(sampler=list(range(20))), max_duration="1ep")
        first.fit(duration="3ba")
        path = first.save_checkpoint(str(tmp_path / "one"))
        backwards = plain_loader(sampler=list(range(19, -1, -1)))
        other = small_run(train_dataloader=backwards, max_duration="1ep", load_path=path)

        with pytest.warns(UserWarning, match="sampler gives another order than before the run stopped"):
            other.fit()

    def test_weights_only_warns(self, tmp_path, caplog):
        """A run that saves only weights cannot resume, and warns when it is restarted."""
        options = {"save_folder": str(tmp_path), "run_name": "blur", "autoresume": True, "save_weights_only": True}
        small_run(max_duration="1ep", **options).fit()

        later = small_run(max_duration="1ep", **options)

        assert int(later.state.timestamp.batch) == 0
        assert "there are only weights of 'blur'" in caplog.text


class TestOptimizers:
    @pytest.mark.parametrize(
        ("make", "changed"),
        [
            (lambda params: torch.optim.SGD(params, lr=0.1, foreach=False), []),
            (lambda params: torch.optim.SGD(params, lr=0.01), ["lr: 0.1 was saved, 0.01 is set."]),
            (
                lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.5),
                ["momentum: 0 was saved, 0.9 is set.", "weight_decay: 0 was saved, 0.5 is set."],
            ),
        ],
    )
    @pytest.mark.parametrize("schedule", [None, torch.optim.lr_scheduler.StepLR, "assigned"])
    def test_changed_arguments_warn(self, tmp_path, make, changed, schedule):
        """What the program has changed is reported, and not what a schedule or a callback has changed."""

        class Assign(Callback):
            def batch_end(self, state, logger):
                state.optimizers[0].param_groups[0]["lr"] = 0.03

        def run(make_optimizer, duration):
            model = make_classifier()
            optimizer = make_optimizer(model.parameters())
            options = {"callbacks": Assign()} if schedule == "assigned" else {}
            if isinstance(schedule, type):
                options["schedulers"] = schedule(optimizer, 1, gamma=0.5)
            saving = {"save_folder": str(tmp_path), "run_name": "first", "autoresume": True}
            return small_run(model=model, optimizers=optimizer, max_duration=duration, **saving, **options)

        run(lambda params: torch.optim.SGD(params, lr=0.1), "1ep").fit()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(make, "2ep")

        lines = [line for one in caught for line in str(one.message).splitlines() if "was saved" in line]
        assert lines == [f"- optimizers.SGD.param_groups[0].{one}" for one in changed]
        assert all(one.filename.endswith(("runs.py", "test_state.py")) for one in caught)

    def test_optimizers_that_were_not_saved_are_not_compared(self, tmp_path):
        """Those of the program keep their arguments, with no other warning than that of this."""
        small_run(max_duration="2ba", save_folder=tmp_path, save_ignore_keys="optimizers/*").fit()
        model = make_classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.7)

        with pytest.warns(UserWarning, match="SGD is not saved") as caught:
            resumed = small_run(model=model, optimizers=optimizer, max_duration="4ba", load_path=tmp_path / "latest")

        assert len(caught) == 1
        assert resumed.fit().steps == 2
        assert optimizer.param_groups[0]["lr"] == 0.7

    @pytest.mark.parametrize("ignored", ["optimizers", "optimizers/*", "optimizers/SGD"])
    def test_optimizers_that_are_not_loaded_are_not_compared(self, tmp_path, ignored):
        def run(rate, **options):
            model = make_classifier()
            return small_run(model=model, optimizers=torch.optim.SGD(model.parameters(), lr=rate), **options)

        run(0.1, max_duration="1ep", save_folder=str(tmp_path), run_name="first").fit()

        later = run(0.01, max_duration="2ep", load_path=str(tmp_path / "latest"), load_ignore_keys=ignored)

        assert later.state.optimizers[0].param_groups[0]["lr"] == 0.01


class TestMetricState:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: MulticlassAccuracy(3),
            lambda: ClasswiseWrapper(MulticlassAccuracy(3, average=None)),
            lambda: MetricCollection([MulticlassAccuracy(3), MulticlassPrecision(3)], prefix="a"),
        ],
        ids=["one", "wrapped", "collected"],
    )
    def test_metric_state_is_restored(self, make):
        """A metric's state is restored, also for another instance."""
        complete, again = make(), make()
        batches = [(torch.eye(3), torch.tensor(targets)) for targets in ([0, 1, 1], [0, 0, 2])]
        complete.update(*batches[0])
        load_metrics({"m": again}, save_metrics({"m": complete}), torch.device("cpu"))
        complete.update(*batches[1])
        again.update(*batches[1])

        assert json.dumps(values(again)) == json.dumps(values(complete))


def values(metric):
    computed = metric.compute()
    return {name: one.tolist() for name, one in computed.items()} if isinstance(computed, dict) else computed.tolist()


class Noisy(Dataset):
    """Twelve samples with noise from an own generator."""

    def __init__(self):
        self.generator = random.Random(3)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((4,), self.generator.random()), index % 3


class WithGenerator(Callback):
    """A callback with a generator."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)


def make_run(data):
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(1))
    train, evaluated = DataLoader(data, batch_size=4, sampler=sampler), DataLoader(Noisy(), batch_size=4)
    return small_run(train_dataloader=train, eval_dataloader=evaluated, callbacks=[WithGenerator()], max_duration="1ep")


def test_generators_are_saved_by_name():
    """Those of components and of the data, without that of the sampler, which is replayed with the data."""
    saved = plain(make_run(Noisy())._resume_state.values())["process"]

    assert {*saved["objects"]["generators"]} == {
        "callbacks.WithGenerator.generator",
        "train_dataloader.dataset.generator",
        "evaluators.eval.dataset.generator",
    }
    assert {*saved["data"]["objects"]["generators"]} == {"sampler.generator"}


def test_data_of_other_processes_that_is_saved_again():
    """As all processes have that of the first one, no number of processes resumes exactly from it."""
    saved, run = plain(make_run(Noisy())._resume_state.values()), make_run(Noisy())._resume_state
    problems, restore_run = run.compare(saved | {"world_size": 2}, (), "runs/ba1")
    assert problems == []
    restore_run()

    assert run.values()["world_size"] == 0
    again, continued = plain(run.values()), make_run(Noisy())._resume_state
    continued.compare(again, (), "runs/ba1")[1]()
    with pytest.warns(UserWarning, match="saved by other processes"):
        continued.begin()


def test_generators_are_restored():
    """A run continues with the draws that come after the save."""
    data, other = Noisy(), Noisy()
    data.generator.random()
    saved = plain(make_run(data)._resume_state.values())
    expected = data.generator.random()

    resumed = make_run(other)._resume_state
    problems, restore_run = resumed.compare(saved, (), "runs/ba1")
    assert problems == []
    restore_run()
    resumed.begin()

    assert other.generator.random() == expected

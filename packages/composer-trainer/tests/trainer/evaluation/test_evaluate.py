"""Evaluation: interval, data, results, and no effect on training."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, default_collate
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from composer.core import Callback, DataSpec, Evaluator, Event
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier, ComposerModel
from composer.trainer import Trainer
from fixtures import make_classifier, make_loader, small_run, weights


class CountEvaluations(Callback):
    """Records the number of the batch before each evaluation."""

    def __init__(self):
        self.batches = []

    def eval_before_all(self, state, logger):
        self.batches.append(int(state.timestamp.batch))


def test_outputs_are_freed_before_the_next():
    """The outputs of a batch do not take memory while those of the next are computed."""
    held = []

    class Held(Callback):
        def eval_before_forward(self, state, logger):
            held.append(state.outputs)

    small_run(callbacks=Held(), eval_dataloader=make_loader(), max_duration="1ep").fit()

    assert held == [None] * 5


class TestInterval:
    @pytest.mark.parametrize(
        ("interval", "batches"),
        [
            (1, [5, 10]),
            ("2ep", [10]),
            ("3ba", [3, 6, 9, 10]),
            ("0.5dur", [5, 10]),
            ("0.2dur", [2, 4, 6, 8, 10]),
            ("8sp", [2, 4, 6, 8, 10]),
            (0, []),
            (lambda state, event: event is Event.BATCH_END and state.timestamp.batch == 4, [4]),
        ],
    )
    def test_evaluates_when_it_is_due(self, interval, batches):
        """Evaluations run at an interval in any unit, and at the end of the training."""
        count = CountEvaluations()
        trainer = small_run(eval_dataloader=make_loader(), eval_interval=interval, callbacks=count, max_duration="2ep")

        trainer.fit()

        assert count.batches == batches

    def test_again_after_the_clock_was_reset(self):
        """A training that ends at the batch of the last evaluation of an earlier one is evaluated, too."""
        count = CountEvaluations()
        trainer = small_run(eval_dataloader=make_loader(), callbacks=count, max_duration="1ep")

        trainer.fit()
        trainer.fit(train_dataloader=make_loader(batch_size=2), duration="5ba", reset_time=True)

        assert count.batches == [5, 5]

    def test_each_evaluator_has_its_own_interval(self):
        """An evaluator's interval takes precedence over the trainer's."""
        labels = []

        class Observer(Callback):
            def eval_start(self, state, logger):
                labels.append(state.dataloader_label)

        evaluators = [
            Evaluator(label="often", dataloader=make_loader(), eval_interval="1ep"),
            Evaluator(label="seldom", dataloader=make_loader()),
        ]
        trainer = small_run(eval_dataloader=evaluators, eval_interval="2ep", callbacks=Observer(), max_duration="2ep")

        trainer.fit()

        assert labels == ["often", "often", "seldom"]

    def test_each_evaluator_keeps_its_own_values(self):
        """Two evaluators with the same metrics have separate values in the state."""
        inputs, targets = make_loader().dataset.tensors
        parts = {"first": slice(0, 5), "rest": slice(5, None)}
        evaluators = [
            Evaluator(label=label, dataloader=DataLoader(TensorDataset(inputs[part], targets[part]), batch_size=4))
            for label, part in parts.items()
        ]
        trainer = small_run()

        trainer.eval(evaluators)

        with torch.no_grad():
            outputs = trainer.state.model.module(inputs)
        for label, part in parts.items():
            loss = nn.functional.cross_entropy(outputs[part], targets[part])
            torch.testing.assert_close(trainer.state.eval_metric_values[label]["CrossEntropy"], loss)


def triple(fields):
    """Return a batch with three samples of each."""
    return [field.repeat_interleave(3, dim=0) for field in fields]


class Announcing:
    """A loader of four batches with another length."""

    def __len__(self):
        return 5

    def __iter__(self):
        return iter(make_loader(16))


class TestCountedSamples:
    """Samples are those of the batches, not the items of the data set."""

    @pytest.mark.parametrize("is_distributed", [True, False])
    @pytest.mark.parametrize(
        "options",
        [
            {"collate_fn": lambda samples: triple(default_collate(samples))},
            {"batch_transforms": triple},
            {"batch_transforms": triple, "get_num_samples_in_batch": lambda batch: 7},
        ],
    )
    def test_all_samples_of_a_batch_count(self, options, is_distributed):
        """A function that makes three samples of one does not end the data early."""
        data = make_loader(8).dataset
        sampler = DistributedSampler(data, num_replicas=1, rank=0) if is_distributed else None
        loader = DataLoader(data, 4, sampler=sampler, collate_fn=options.get("collate_fn"))
        functions = {name: function for name, function in options.items() if name != "collate_fn"}
        matrix = MulticlassConfusionMatrix(3)
        model = ComposerClassifier(nn.Linear(4, 3), num_classes=3, val_metrics={"matrix": matrix})

        results = small_run(model=model).eval(DataSpec(loader, **functions))

        assert int(results["eval"]["matrix"].sum()) == 24

    def test_confusion_matrix_is_a_table(self):
        """A matrix is logged as one table, and not as a series for each element, in training and evaluation."""
        memory, matrix = InMemoryLogger(), MulticlassConfusionMatrix(3)
        model = ComposerClassifier(nn.Linear(4, 3), train_metrics={"matrix": matrix}, val_metrics={"matrix": matrix})
        result = small_run(model=model, eval_dataloader=make_loader(8), max_duration="1ep", loggers=memory).fit()

        assert set(memory.tables) == {"metrics/train/matrix", "metrics/eval/matrix"}
        assert memory.tables["metrics/eval/matrix"]["columns"] == ["0", "1", "2"]
        assert sum(map(sum, memory.tables["metrics/eval/matrix"]["rows"])) == 8
        assert not [name for name in [*memory.data, *result.metrics] if "matrix" in name]

    @pytest.mark.parametrize("classes", [20, 100])
    def test_long_vector_is_a_table(self, classes):
        """A metric of each class is a series for each of up to 20 classes, and one table of more."""
        memory, metric = InMemoryLogger(), MulticlassAccuracy(classes, average=None)
        model = ComposerClassifier(nn.Linear(4, classes), train_metrics=[], val_metrics={"accuracy": metric})
        trainer = small_run(model=model, eval_dataloader=make_loader(8), max_duration="1ep", loggers=memory)
        result = trainer.fit()

        series = [f"metrics/eval/accuracy/{number}" for number in range(classes)]
        values = trainer.state.eval_metric_values["accuracy"].tolist()
        if classes == 20:
            assert not memory.tables
            assert [result.metrics[name] for name in series] == values
        else:
            assert memory.tables["metrics/eval/accuracy"]["rows"] == [values]
            assert not set(series) & {*result.metrics, *memory.data}

    def test_fewer_batches_than_the_length_warn(self):
        """The warning states both numbers; a subset that is complete does not warn."""
        trainer = small_run()
        trainer.eval(Announcing(), subset_num_batches=4)

        with pytest.warns(UserWarning, match="'eval' has a length of 5 batches and returned only 4"):
            trainer.eval(Announcing())

    def test_a_stream_has_no_length_to_correct(self):
        """A stream with fewer batches than the subset is complete, without a warning."""
        stream = (batch for batch in list(make_loader(16)))

        trainer = small_run(seed=1)
        trainer.eval(stream, subset_num_batches=9)

        assert int(trainer.state.eval_timestamp.batch) == 4


class TestResult:
    @pytest.mark.parametrize("batch_size", [1, 3, 7, 20])
    def test_equals_manual_computation_for_any_batch_size(self, batch_size):
        """Accuracy and loss are those of all samples, for any batch size."""
        trainer = small_run()
        inputs, targets = make_loader().dataset.tensors
        with torch.no_grad():
            outputs = trainer.state.model.module(inputs)

        results = trainer.eval(make_loader(batch_size=batch_size))

        accuracy = (outputs.argmax(dim=1) == targets).float().mean()
        torch.testing.assert_close(results["eval"]["MulticlassAccuracy"], accuracy)
        torch.testing.assert_close(results["eval"]["CrossEntropy"], nn.functional.cross_entropy(outputs, targets))

    def test_subset(self):
        """Only the given number of batches is evaluated."""
        trainer = small_run()
        inputs, targets = (tensor[:8] for tensor in make_loader().dataset.tensors)
        with torch.no_grad():
            expected = nn.functional.cross_entropy(trainer.state.model.module(inputs), targets)

        results = trainer.eval(make_loader(), subset_num_batches=2)

        torch.testing.assert_close(results["eval"]["CrossEntropy"], expected)

    @pytest.mark.parametrize(("subset", "batches"), [(None, 1), (2, 2), (-1, 5)])
    def test_subset_of_eval_precedes_that_of_an_evaluator(self, subset, batches):
        """An evaluation of all data is possible beside evaluators that are limited in the training."""
        trainer = small_run(eval_dataloader=Evaluator(label="data", dataloader=make_loader(), subset_num_batches=1))

        trainer.eval(subset_num_batches=subset)

        assert int(trainer.state.eval_timestamp.batch) == batches

    def test_metrics_are_reset(self):
        """An earlier evaluation does not change a later one."""
        trainer = small_run(eval_dataloader=make_loader(), max_duration="3ep")
        trainer.eval()
        trainer.fit()
        inputs, targets = make_loader().dataset.tensors
        with torch.no_grad():
            expected = nn.functional.cross_entropy(trainer.state.model.module(inputs), targets)

        results = trainer.eval()

        torch.testing.assert_close(results["eval"]["CrossEntropy"], expected)

    def test_metric_names(self):
        """An evaluator computes the listed metrics only."""
        trainer = small_run()

        results = trainer.eval(Evaluator(label="test", dataloader=make_loader(), metric_names=["*Accuracy"]))

        assert list(results) == ["test"]
        assert list(results["test"]) == ["MulticlassAccuracy"]

    def test_microbatches(self):
        """The result does not depend on the microbatch size."""
        trainer = small_run()

        complete = trainer.eval(make_loader(batch_size=10))["eval"]["CrossEntropy"]
        parts = trainer.eval(
            Evaluator(label="eval", dataloader=make_loader(batch_size=10), device_eval_microbatch_size=3)
        )

        torch.testing.assert_close(parts["eval"]["CrossEntropy"], complete)


class TestWhatIsEvaluated:
    @pytest.mark.parametrize(("value", "batches"), [(None, 2), (3, 3), (-1, 5)])
    def test_subset_of_the_constructor(self, value, batches):
        """eval() uses the trainer's number of batches by default."""
        recorded = []

        class Observer(Callback):
            def eval_batch_end(self, state, logger):
                recorded.append(state.batch)

        trainer = small_run(eval_dataloader=make_loader(), eval_subset_num_batches=2, callbacks=Observer())

        trainer.eval(subset_num_batches=value)

        assert len(recorded) == batches

    def test_unlabelled_loaders_raise(self):
        """Two loaders in a list raise, as their metrics would have equal names."""
        with pytest.raises(ValueError, match=r"Evaluator\(label.*a label of its own, got"):
            small_run(eval_dataloader=[make_loader(), make_loader()])

    @pytest.mark.parametrize(("loader", "message"), [([], "has no batches"), (iter([]), "returned no batch")])
    def test_empty_loader(self, loader, message):
        """An evaluation without batches raises, with a known length before it begins."""
        with pytest.raises(ValueError, match=message):
            small_run().eval(loader)


class TestNoSideEffects:
    def test_evaluations_do_not_change_training(self):
        """The weights are bit-identical with and without evaluations."""
        shuffled = {"train_dataloader": make_loader(shuffle=True), "max_duration": "2ep"}
        plain = small_run(model=make_classifier(), **shuffled)
        plain.fit()
        watched = small_run(
            **shuffled,
            model=make_classifier(),
            eval_dataloader=make_loader(seed=1),
            eval_interval="1ba",
        )
        watched.fit()

        assert torch.equal(weights(plain), weights(watched))

    def test_evaluation_time_is_excluded(self):
        """The training clock does not advance during an evaluation."""
        import time

        class Slow(Callback):
            def eval_start(self, state, logger):
                time.sleep(0.3)

        trainer = small_run(eval_dataloader=make_loader(), callbacks=Slow(), max_duration="1ep")

        trainer.fit()

        assert trainer.state.timestamp.total_wct.total_seconds() < 0.3


class OfWorkers(Dataset):
    """Samples without a class whose input is the number of the process that has loaded them."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((4,), float(os.getpid())), index % 2


@pytest.mark.parametrize("subset", [-1, 1])
@pytest.mark.parametrize("persistent", [True, False])
def test_persistent_workers_load_for_each_evaluation(persistent, subset):
    """Workers that are to persist load the data of the next evaluation, also after one of a part of the data."""
    loader, processes = DataLoader(OfWorkers(), batch_size=2, num_workers=1, persistent_workers=persistent), []
    trainer = small_run(eval_dataloader=loader, eval_subset_num_batches=subset, max_duration="3ep")
    trainer.engine.on("eval_batch_end", lambda state, _: processes.append(state.batch[0].unique().tolist()))
    trainer.fit()

    assert len(processes) == 3 * (4 if subset == -1 else 1)
    assert len({one for batch in processes for one in batch}) == (1 if persistent else 3)


class TestErrors:
    def test_missing_data(self):
        """The error states the missing argument."""
        with pytest.raises(ValueError, match="eval_dataloader"):
            small_run().eval()

    def test_model_without_metrics(self):
        """A model without metrics raises when it is evaluated."""

        class OnlyLoss(nn.Linear):
            def forward(self, batch):
                return super().forward(batch[0])

            def loss(self, outputs, batch):
                return nn.functional.cross_entropy(outputs, batch[1])

        with pytest.raises(TypeError, match="get_metrics"):
            small_run(model=OnlyLoss(4, 3), eval_dataloader=make_loader())


class TestTrainingMetric:
    def test_is_logged_each_epoch(self):
        """The training metric is computed from the training outputs and reset in each epoch."""
        from composer.loggers import InMemoryLogger

        log = InMemoryLogger()
        outputs, targets = [], []

        class Observer(Callback):
            def after_forward(self, state, logger):
                outputs.append(state.outputs.detach().argmax(dim=1))
                targets.append(state.batch[1])

        trainer = small_run(train_metrics=None, loggers=log, callbacks=Observer(), max_duration="2ep")

        trainer.fit()

        logged = [float(value) for _, value in log.data["metrics/train/MulticlassAccuracy"]]
        by_epoch = [
            (torch.cat(outputs[start : start + 5]) == torch.cat(targets[start : start + 5])).float().mean().item()
            for start in (0, 5)
        ]
        assert logged == pytest.approx(by_epoch)


def test_model_without_parameters():
    """A model with nothing to train can be evaluated, also with the data of the Trainer."""

    class Identity(nn.Module):
        def forward(self, x):
            return x

    model = ComposerClassifier(Identity(), num_classes=4)
    data = DataLoader(TensorDataset(torch.eye(4), torch.arange(4)), batch_size=2)

    with Trainer(model=model, eval_dataloader=data, progress_bar=False, device="cpu") as trainer:
        own, given = trainer.eval(), trainer.eval(data)

    assert own["eval"]["MulticlassAccuracy"] == given["eval"]["MulticlassAccuracy"] == 1


class OwnLoss(ComposerModel):
    """A model with the metrics of its base class: the loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


class WithoutMetrics(OwnLoss):
    """A model without metrics."""

    def get_metrics(self, is_train):
        return {}


class LossInParts(OwnLoss):
    """A model whose loss has parts."""

    def loss(self, outputs, batch):
        return {"first": super().loss(outputs, batch), "second": 2 * outputs.square().mean()}


def test_loss_of_the_model():
    """A model without metrics is evaluated by its loss: that of all samples, whatever the batches."""
    data, model = [(torch.randn(count, 4), torch.arange(count) % 3) for count in (8, 5)], OwnLoss()
    inputs, targets = (torch.cat(part) for part in zip(*data, strict=True))
    expected = nn.functional.cross_entropy(model.layer(inputs), targets)

    values = small_run(model=model, eval_dataloader=data).eval()

    torch.testing.assert_close(values["eval"], {"loss": expected.detach()})


def test_parts_of_the_loss():
    """Parts are metrics, too, and their sum is the loss."""
    data, model = [(torch.randn(count, 4), torch.arange(count) % 3) for count in (8, 5)], LossInParts()
    inputs, targets = (torch.cat(part) for part in zip(*data, strict=True))
    first = nn.functional.cross_entropy(outputs := model.layer(inputs).detach(), targets)
    second = 2 * outputs.square().mean()

    values = small_run(model=model, eval_dataloader=data).eval()

    torch.testing.assert_close(values["eval"], {"loss": first + second, "loss/first": first, "loss/second": second})


def test_best_checkpoint_by_the_loss(tmp_path):
    """``save_best="eval/loss"`` needs no metric of the user."""
    options = {"save_folder": str(tmp_path), "save_best": "eval/loss", "max_duration": "2ep"}
    small_run(model=LossInParts(), eval_dataloader=make_loader(), **options).fit()

    assert (tmp_path / "best").exists()


def test_data_without_metrics_warn():
    """Data to evaluate on beside a model without metrics warn, unless the evaluator says so."""
    with pytest.warns(UserWarning, match=r"\(eval\) are evaluated without a metric, as WithoutMetrics\.get_metrics"):
        small_run(model=WithoutMetrics(), eval_dataloader=make_loader())

    evaluator = Evaluator(label="eval", dataloader=make_loader(), metric_names=[])
    assert small_run(model=WithoutMetrics(), eval_dataloader=evaluator).eval() == {"eval": {}}

"""When the trainer evaluates, on what, and that training does not notice."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer.core import Callback, Evaluator, Event
from composer.models import ComposerClassifier


class CountEvaluations(Callback):
    """Keeps the number of the batch after which each evaluation came."""

    def __init__(self):
        self.batches = []

    def eval_before_all(self, state, logger):
        self.batches.append(int(state.timestamp.batch))


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
    def test_evaluates_when_it_is_due(self, make_trainer, interval, batches):
        """An interval in any unit, and once more at the end if training ends between two."""
        count = CountEvaluations()
        trainer = make_trainer(
            eval_dataloader=make_trainer.loader(), eval_interval=interval, callbacks=count, max_duration="2ep"
        )

        trainer.fit()

        assert count.batches == batches

    def test_iterations_are_counted_too(self, make_trainer):
        """An interval in iterations is due when one ends, not only when training does."""
        count = CountEvaluations()
        trainer = make_trainer(
            eval_dataloader=make_trainer.loader(), eval_interval="1iter", callbacks=count, max_duration="2iter"
        )

        trainer.fit()

        assert count.batches == [5, 10]

    def test_each_evaluator_has_its_own_interval(self, make_trainer):
        """An evaluator's interval goes before the trainer's."""
        labels = []

        class Look(Callback):
            def eval_start(self, state, logger):
                labels.append(state.dataloader_label)

        evaluators = [
            Evaluator(label="often", dataloader=make_trainer.loader(), eval_interval="1ep"),
            Evaluator(label="seldom", dataloader=make_trainer.loader()),
        ]
        trainer = make_trainer(eval_dataloader=evaluators, eval_interval="2ep", callbacks=Look(), max_duration="2ep")

        trainer.fit()

        assert labels == ["often", "often", "seldom"]

    def test_each_evaluator_keeps_its_own_values(self, make_trainer):
        """Two evaluators with the same metrics do not overwrite each other's values in the state."""
        inputs, targets = make_trainer.loader().dataset.tensors
        parts = {"first": slice(0, 5), "rest": slice(5, None)}
        evaluators = [
            Evaluator(label=label, dataloader=DataLoader(TensorDataset(inputs[part], targets[part]), batch_size=4))
            for label, part in parts.items()
        ]
        trainer = make_trainer()

        trainer.eval(evaluators)

        with torch.no_grad():
            outputs = trainer.state.model.module(inputs)
        for label, part in parts.items():
            loss = nn.functional.cross_entropy(outputs[part], targets[part])
            torch.testing.assert_close(trainer.state.eval_metric_values[label]["CrossEntropy"], loss)


class TestResult:
    @pytest.mark.parametrize("batch_size", [1, 3, 7, 20])
    def test_equals_a_computation_by_hand_for_any_batch_size(self, make_trainer, batch_size):
        """Accuracy and loss are those of all samples, however they are batched."""
        trainer = make_trainer()
        inputs, targets = make_trainer.loader().dataset.tensors
        with torch.no_grad():
            outputs = trainer.state.model.module(inputs)

        results = trainer.eval(make_trainer.loader(batch_size=batch_size))

        accuracy = (outputs.argmax(dim=1) == targets).float().mean()
        torch.testing.assert_close(results["eval"]["MulticlassAccuracy"], accuracy)
        torch.testing.assert_close(results["eval"]["CrossEntropy"], nn.functional.cross_entropy(outputs, targets))

    def test_subset(self, make_trainer):
        """Only so many batches are looked at."""
        trainer = make_trainer()
        inputs, targets = (tensor[:8] for tensor in make_trainer.loader().dataset.tensors)
        with torch.no_grad():
            expected = nn.functional.cross_entropy(trainer.state.model.module(inputs), targets)

        results = trainer.eval(make_trainer.loader(), subset_num_batches=2)

        torch.testing.assert_close(results["eval"]["CrossEntropy"], expected)

    def test_each_evaluation_begins_anew(self, make_trainer):
        """What an earlier evaluation counted is not in a later one."""
        trainer = make_trainer(eval_dataloader=make_trainer.loader(), max_duration="3ep")
        trainer.eval()
        trainer.fit()
        inputs, targets = make_trainer.loader().dataset.tensors
        with torch.no_grad():
            expected = nn.functional.cross_entropy(trainer.state.model.module(inputs), targets)

        results = trainer.eval()

        torch.testing.assert_close(results["eval"]["CrossEntropy"], expected)

    def test_metric_names_choose(self, make_trainer):
        """An evaluator computes the metrics that it names."""
        trainer = make_trainer()

        results = trainer.eval(Evaluator(label="test", dataloader=make_trainer.loader(), metric_names=["*Accuracy"]))

        assert list(results) == ["test"]
        assert list(results["test"]) == ["MulticlassAccuracy"]

    def test_other_data_under_the_same_label(self, make_trainer):
        """What an evaluator measures stays, when other data of its label is evaluated on by all metrics in between."""
        chosen = Evaluator(label="eval", dataloader=make_trainer.loader(), metric_names=["*Accuracy"])
        trainer = make_trainer(eval_dataloader=chosen)

        other = trainer.eval(make_trainer.loader(seed=1))
        results = trainer.eval()

        assert sorted(other["eval"]) == ["CrossEntropy", "MulticlassAccuracy"]
        assert list(results["eval"]) == ["MulticlassAccuracy"]

    def test_microbatches_of_an_evaluation(self, make_trainer):
        """The result does not depend on how many samples go through the model at once."""
        trainer = make_trainer()

        whole = trainer.eval(make_trainer.loader(batch_size=10))["eval"]["CrossEntropy"]
        parts = trainer.eval(
            Evaluator(label="eval", dataloader=make_trainer.loader(batch_size=10), device_eval_microbatch_size=3)
        )

        torch.testing.assert_close(parts["eval"]["CrossEntropy"], whole)


class TestWhatIsEvaluated:
    @pytest.mark.parametrize(("given", "batches"), [(None, 2), (3, 3), (-1, 5)])
    def test_subset_of_the_constructor_holds_until_another_is_given(self, make_trainer, given, batches):
        """eval() uses the trainer's number of batches by default."""
        seen = []

        class Look(Callback):
            def eval_batch_end(self, state, logger):
                seen.append(state.batch)

        trainer = make_trainer(eval_dataloader=make_trainer.loader(), eval_subset_num_batches=2, callbacks=Look())

        trainer.eval(subset_num_batches=given)

        assert len(seen) == batches

    def test_interval_can_be_changed_by_fit(self, make_trainer):
        """fit(eval_interval=) holds for the evaluators that are there."""
        count = CountEvaluations()
        trainer = make_trainer(eval_dataloader=make_trainer.loader(), callbacks=count, max_duration="1ep")

        trainer.fit(eval_interval="2ba")

        assert count.batches == [2, 4, 5]

    def test_interval_of_the_constructor_holds_for_other_data(self, make_trainer):
        """fit(eval_dataloader=) keeps the interval of the trainer."""
        count = CountEvaluations()
        trainer = make_trainer(eval_interval="2ba", callbacks=count, max_duration="1ep")

        trainer.fit(eval_dataloader=make_trainer.loader())

        assert count.batches == [2, 4, 5]

    def test_several_loaders_need_names(self, make_trainer):
        """Two loaders in a list are refused: their metrics would have the same names."""
        with pytest.raises(TypeError, match="Evaluator"):
            make_trainer(eval_dataloader=[make_trainer.loader(), make_trainer.loader()])

    def test_a_loader_without_batches(self, make_trainer):
        """An evaluation of nothing has no result."""
        with pytest.raises(ValueError, match="gave no batch"):
            make_trainer().eval([])

    def test_subset_out_of_range(self, make_trainer):
        """Nought batches are none, and minus five are nothing."""
        with pytest.raises(ValueError, match="eval_subset_num_batches must be"):
            make_trainer(eval_subset_num_batches=0)


class TestTrainingDoesNotNotice:
    def test_the_same_bits_with_and_without_evaluations(self, make_trainer):
        """Evaluations in between change no weight."""
        shuffled = {"train_dataloader": make_trainer.loader(shuffle=True), "max_duration": "2ep"}
        plain = make_trainer(model=make_trainer.model(), **shuffled)
        plain.fit()
        watched = make_trainer(
            **shuffled,
            model=make_trainer.model(),
            eval_dataloader=make_trainer.loader(seed=1),
            eval_interval="1ba",
        )
        watched.fit()

        assert torch.equal(make_trainer.weights(plain), make_trainer.weights(watched))

    def test_mode_and_data_are_put_back_when_an_evaluation_raises(self, make_trainer):
        """The model is in training mode again and the state has its own data."""

        class Fails(Callback):
            def eval_batch_end(self, state, logger):
                raise ArithmeticError("on purpose")

        trainer = make_trainer(eval_dataloader=make_trainer.loader(), callbacks=Fails(), max_duration="1ep")

        with pytest.raises(ArithmeticError):
            trainer.fit()

        assert trainer.state.model.training
        assert trainer.state.dataloader_label == "train"

    def test_a_part_in_evaluation_mode_stays_in_it(self, make_trainer):
        """A layer that is trained in evaluation mode, as frozen batch norm is, is so after an evaluation, too."""

        class Freeze(Callback):
            def epoch_start(self, state, logger):
                state.model.module[0].eval()

        trainer = make_trainer(
            eval_dataloader=make_trainer.loader(), eval_interval="2ba", callbacks=Freeze(), max_duration="4ba"
        )

        trainer.fit()

        assert not trainer.state.model.module[0].training
        assert trainer.state.model.training
        assert trainer.state.model.module[2].training

    def test_evaluation_does_not_count_as_training_time(self, make_trainer):
        """The training's clock stands still while an evaluation runs."""
        import time

        class Slow(Callback):
            def eval_start(self, state, logger):
                time.sleep(0.3)

        trainer = make_trainer(eval_dataloader=make_trainer.loader(), callbacks=Slow(), max_duration="1ep")

        trainer.fit()

        assert trainer.state.timestamp.total_wct.total_seconds() < 0.3


class TestErrors:
    def test_nothing_to_evaluate_on(self, make_trainer):
        """Eval without data says what to give."""
        with pytest.raises(ValueError, match="eval_dataloader"):
            make_trainer().eval()

    def test_unknown_metric(self, make_trainer):
        """A metric that the model does not have is refused at construction, with those it has."""
        evaluator = Evaluator(label="eval", dataloader=make_trainer.loader(), metric_names=["F1"])

        with pytest.raises(ValueError, match=r"'F1'.*MulticlassAccuracy"):
            make_trainer(eval_dataloader=evaluator)

    def test_two_evaluators_of_one_label(self, make_trainer):
        """Their metrics would have the same names."""
        evaluators = [Evaluator(label="eval", dataloader=make_trainer.loader()) for _ in range(2)]

        with pytest.raises(ValueError, match="label of its own"):
            make_trainer(eval_dataloader=evaluators)

    def test_a_model_that_cannot_be_measured(self, make_trainer):
        """A model without metrics is refused where it is to be evaluated."""

        class OnlyLoss(nn.Linear):
            def forward(self, batch):
                return super().forward(batch[0])

            def loss(self, outputs, batch):
                return nn.functional.cross_entropy(outputs, batch[1])

        with pytest.raises(TypeError, match="get_metrics"):
            make_trainer(model=OnlyLoss(4, 3), eval_dataloader=make_trainer.loader())


class TestTrainingMetric:
    def test_is_logged_each_epoch_with_the_labels_of_the_data(self, make_trainer):
        """The training metric is computed from the outputs in training and reset in each epoch."""
        from composer.loggers import InMemoryLogger

        log = InMemoryLogger()
        outputs, targets = [], []

        class Look(Callback):
            def after_forward(self, state, logger):
                outputs.append(state.outputs.detach().argmax(dim=1))
                targets.append(state.batch[1])

        trainer = make_trainer(train_metrics=None, loggers=log, callbacks=Look(), max_duration="2ep")

        trainer.fit()

        logged = [float(value) for _, value in log.data["metrics/train/MulticlassAccuracy"]]
        by_epoch = [
            (torch.cat(outputs[start : start + 5]) == torch.cat(targets[start : start + 5])).float().mean().item()
            for start in (0, 5)
        ]
        assert logged == pytest.approx(by_epoch)

    def test_a_model_may_have_no_metrics(self, make_trainer):
        """A classifier without training metrics trains."""
        model = ComposerClassifier(nn.Linear(4, 3), num_classes=3, train_metrics=[])
        trainer = make_trainer(model=model, max_duration="1ba")

        trainer.fit()

        assert trainer.state.train_metric_values == {}

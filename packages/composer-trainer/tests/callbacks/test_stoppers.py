"""EarlyStopper and ThresholdStopper in real trainings with a scripted metric."""

import math
import re

import pytest
import torch
from torch import nn
from torchmetrics import Metric

from composer.callbacks import EarlyStopper, ThresholdStopper
from composer.core import Evaluator, Time
from composer.models import ComposerModel
from fixtures import small_run


class Score(Metric):
    """A metric that returns the values of a list in order; more is better."""

    full_state_update = False
    higher_is_better = True

    def __init__(self, script, parts=None):
        super().__init__()
        self.script, self.parts, self.reads = script, parts, 0
        self.add_state("updates", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, *_):
        self.updates += 1

    def compute(self):
        value = torch.tensor(float(self.script[self.reads % len(self.script)]))
        self.reads += 1
        return value if self.parts is None else dict.fromkeys(self.parts, value)


class Undeclared(Score):
    higher_is_better = None


class Error(Score):
    higher_is_better = False


class Model(ComposerModel):
    def __init__(self, train=None, evaluation=None, parts=None, score=Score):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.metrics = {True: train, False: evaluation}
        self.parts, self.score = parts, score

    def forward(self, batch):
        return self.layer(batch)

    def loss(self, outputs, batch):
        return outputs.square().mean()

    def get_metrics(self, is_train):
        script = self.metrics[is_train]
        return {} if script is None else {"Score": self.score(script, self.parts)}

    def update_metric(self, batch, outputs, metric):
        metric.update()


def make(callback, train=None, evaluation=None, max_duration="10ep", parts=None, score=Score, **options):
    """Return a trainer with 5 batches per epoch."""
    torch.manual_seed(0)
    model = Model(train, evaluation, parts, score)
    data = [torch.ones(4, 2)] * 5
    if evaluation is not None:
        options = {"eval_dataloader": data} | options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = {"model": model, "optimizers": optimizer, "train_dataloader": data, "callbacks": callback}
    return small_run(max_duration=max_duration, **settings, **options)


def batches(trainer):
    trainer.fit()
    return int(trainer.state.timestamp.batch)


class TestEarlyStopper:
    @pytest.mark.parametrize(
        ("options", "values", "epochs"),
        [
            ({}, [1, 2, 3, 3, 3, 9], 5),
            ({"patience": 2}, [1, 2, 3, 3, 3, 3, 9], 6),
            ({"patience": "14ba"}, [1, 2, 3, 3, 3, 3, 9], 6),
            ({"patience": "0.1dur"}, [1, 2, 3, 3, 3, 9], 5),
            ({"min_delta": 0.5}, [1, 1.4, 1.5, 2.1], 3),
            ({"comp": "less"}, [1, 2, 3, 4], 3),
            ({"comp": torch.less}, [3, 2, 1, 0, 0, 0, 0], 6),
            ({}, [1, math.nan, math.nan, 5], 3),
            ({}, range(100), 10),
        ],
    )
    def test_stops_without_improvement(self, options, values, epochs):
        """The training stops at the evaluation that is later than the best one by more than the patience."""
        stopper = EarlyStopper("Score", "eval", **options)

        assert batches(make(stopper, evaluation=list(values))) == 5 * epochs

    @pytest.mark.parametrize(("score", "epochs"), [(Score, 3), (Error, 10)])
    def test_direction_is_what_the_metric_declares(self, score, epochs):
        """A metric declares whether more is better, whatever its name is."""
        values = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
        trainer = make(EarlyStopper("Score", "eval"), evaluation=values, score=score)

        assert batches(trainer) == 5 * epochs

    def test_undeclared_direction(self):
        """A metric that declares nothing needs ``comp``, which is reported before the first batch."""
        trainer = make(EarlyStopper("Score", "eval"), evaluation=[1], score=Undeclared)

        with pytest.raises(ValueError, match=r"'Score' does not declare whether more is better .* Set comp='greater'"):
            trainer.fit()

        assert trainer.state.timestamp.batch == 0

    @pytest.mark.parametrize("prefix", ["", "metrics/"])
    def test_name_as_in_save_best(self, prefix):
        """Label and name can be one string, as in ``save_best`` and in the log."""
        stopper = EarlyStopper(f"{prefix}eval/Score/right")

        assert (stopper.dataloader_label, stopper.monitor) == ("eval", "Score/right")
        assert batches(make(stopper, evaluation=[1, 1, 1], parts=("left", "right"))) == 5 * 3

    def test_training_metric(self):
        """With the training label, the metric is checked after each epoch."""
        stopper = EarlyStopper("Score", "train")

        assert batches(make(stopper, train=[1, 2, 2, 2, 9])) == 5 * 4
        assert (stopper.best, stopper.best_occurred.epoch) == (2.0, Time(2, "ep"))

    def test_one_of_several_evaluators(self):
        """Only the evaluator with that label is used."""
        data = [torch.ones(4, 2)]
        evaluators = [Evaluator(label=label, dataloader=data) for label in ("first", "second")]
        trainer = make(EarlyStopper("Score", "second"), evaluation=[1, 1, 1, 5], eval_dataloader=evaluators)
        trainer.state.eval_metrics["first"]["Score"].script = list(range(100))

        assert batches(trainer) == 5 * 3

    def test_name_without_a_label(self):
        """It is that of the evaluator that has the metric, also beside training data; of two, an error lists both."""
        stopper = EarlyStopper("Score")
        assert batches(make(stopper, train=range(10), evaluation=[1, 1, 1])) == 5 * 3
        assert (stopper.dataloader_label, stopper.label) == ("", "eval")

        evaluators = [Evaluator(label=label, dataloader=[torch.ones(4, 2)]) for label in ("first", "second")]
        trainer = make(EarlyStopper("Score"), evaluation=[1], eval_dataloader=evaluators)
        with pytest.raises(ValueError, match=r"must be one of \['first/Score', 'second/Score'\], got 'Score'"):
            trainer.fit()

    def test_name_without_a_label_in_another_trainer(self):
        """It is that of each trainer's own evaluator, and of each fit's."""
        stopper, data = EarlyStopper("Score"), [torch.ones(4, 2)]
        for label in ("eval", "val"):
            trainer = make(stopper, evaluation=[1], eval_dataloader=Evaluator(label=label, dataloader=data))
            assert batches(trainer) == 5 * 3
            assert stopper.monitored_metric == f"metrics/{label}/Score"

    def test_name_without_a_label_in_a_resumed_run(self, tmp_path):
        """The setting does not depend on the evaluator, which a run may pass to ``fit``: resumed, it has no warning."""
        options = {"evaluation": [1], "save_folder": str(tmp_path), "eval_dataloader": None}
        data = [torch.ones(4, 2)]
        make(EarlyStopper("Score"), max_duration="2ep", **options).fit(eval_dataloader=data)
        stopper = EarlyStopper("Score")
        resumed = make(stopper, load_path=str(tmp_path / "latest-rank0.pt"), **options | {"save_overwrite": True})
        resumed.fit(eval_dataloader=data)

        assert resumed.state.timestamp.batch == 5 * 3

    def test_within_an_epoch(self):
        """An evaluation within an epoch stops the training there."""
        stopper = EarlyStopper("Score", "eval", patience="3ba")

        assert batches(make(stopper, evaluation=[5, 4, 3, 2, 1], eval_interval="2ba")) == 6

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"monitor": "score"}, "one of ['eval/Score'], got 'eval/score'; did you mean 'eval/Score'?"),
            ({"dataloader_label": "train"}, "got 'train/Score'; did you mean 'eval/Score'?"),
            ({"dataloader_label": "", "monitor": "score"}, "got 'score'; did you mean 'eval/Score'?"),
            (
                {"dataloader_label": "", "monitor": "loss/train/total"},
                "EarlyStopper: monitor must be one of ['eval/Score'], got 'loss/train/total'. For a loss, add",
            ),
            ({"monitor": "loss"}, "got 'eval/loss'. For a loss, add LossMetric(loss_fn)"),
            ({"monitor": "other"}, "monitor must be one of ['eval/Score'], got 'eval/other'."),
        ],
    )
    def test_unknown_metric(self, options, message):
        """The error is raised before the first batch, with the available metrics."""
        trainer = make(EarlyStopper(**({"monitor": "Score", "dataloader_label": "eval"} | options)), evaluation=[1])

        with pytest.raises(ValueError, match=re.escape(message)):
            trainer.fit()

        assert trainer.state.timestamp.batch == 0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"patience": "-1ep"}, "patience must not be negative, got -1ep"),
            ({"patience": "soon"}, "patience must be .*'soon'"),
            ({"min_delta": -1.0}, "min_delta"),
            ({"comp": "best"}, "comp must be 'less', 'greater', a function .*got 'best'"),
        ],
    )
    def test_bad_arguments(self, options, message):
        """Invalid arguments raise at construction with their names."""
        with pytest.raises(ValueError, match=message):
            EarlyStopper("Score", "eval", **options)


def resumed(stopper, saved, **options):
    """Return a trainer with a loaded state, as between the trainer's two load events."""
    trainer = make(stopper, **options)
    trainer.state.load_state_dict(saved)
    trainer.engine.run_event("after_load")
    return trainer


class TestResume:
    @pytest.mark.parametrize("half", [1, 2, 3, 4])
    def test_stops_at_the_same_batch(self, half):
        """The best value and its time are saved."""
        values = [1, 3, 2, 2, 2, 2]
        first = make(EarlyStopper("Score", "eval", patience=2), evaluation=values, max_duration=f"{half}ep")
        first.fit()

        second = resumed(EarlyStopper("Score", "eval", patience=2), first.state.state_dict(), evaluation=values[half:])

        assert batches(second) == 5 * 5

    @pytest.mark.parametrize(
        "make_stopper",
        [
            lambda: EarlyStopper("Score", "eval"),
            lambda: EarlyStopper("Score"),
            lambda: ThresholdStopper("Score", "eval", 0.5),
        ],
        ids=["early", "early without a label", "threshold"],
    )
    def test_stopped_training_stays_complete(self, make_stopper):
        """The restarted program finds the training complete; with a longer duration it continues."""
        first = make(make_stopper(), evaluation=[1, 1, 1])
        ended = batches(first)

        second = resumed(make_stopper(), first.state.state_dict(), evaluation=[2, 3, 4])
        again = batches(second)
        second.state.callbacks = []
        second.fit(duration="1ep")

        assert ended == again
        assert second.state.timestamp.batch == ended + 5

    @pytest.mark.parametrize(("threshold", "epochs"), [(0.5, 1), (1.5, 2)])
    @pytest.mark.filterwarnings("ignore:The saved state was loaded, and this run differs:UserWarning")
    def test_data_given_to_fit(self, threshold, epochs, tmp_path):
        """A threshold is judged again when training starts, if the metric is not there before."""
        options = {"save_folder": str(tmp_path), "autoresume": True, "run_name": "a"}
        with make(ThresholdStopper("Score", "eval", 0.5), evaluation=[1], **options) as first:
            first.fit()

        stopper = ThresholdStopper("Score", "eval", threshold)
        second = make(stopper, evaluation=[2], eval_dataloader=None, **options)
        result = second.fit(eval_dataloader=[torch.ones(4, 2)])

        assert second.state.timestamp.batch == 5 * epochs
        assert result.reason.startswith("ThresholdStopper: eval/Score")

    @pytest.mark.filterwarnings("ignore:The saved state was loaded, and this run differs:UserWarning")
    def test_longer_patience_continues(self):
        """A longer patience continues a stopped training."""
        first = make(EarlyStopper("Score", "eval"), evaluation=[1])
        first.fit()

        second = resumed(EarlyStopper("Score", "eval", patience="4ep"), first.state.state_dict(), evaluation=[1])

        assert batches(second) == 5 * 6

    @pytest.mark.filterwarnings("ignore:The saved state was loaded, and this run differs:UserWarning")
    def test_higher_threshold_continues(self):
        """A threshold that has not been reached continues a stopped training."""
        first = make(ThresholdStopper("Score", "eval", 0.5), evaluation=[1])
        first.fit()

        second = resumed(ThresholdStopper("Score", "eval", 1.5), first.state.state_dict(), evaluation=[1, 2])

        assert batches(second) == 5 * 3


class TestThresholdStopper:
    @pytest.mark.parametrize(
        ("options", "values", "epochs"),
        [
            ({"threshold": 2.5}, [1, 2, 3, 4], 3),
            ({"threshold": 3}, [1, 2, 3, 4, 5], 4),
            ({"threshold": 2.5, "comp": "less"}, [4, 3, 2, 1], 3),
            ({"threshold": 0.0}, [math.nan, -1, math.nan, 1], 4),
            ({"threshold": 50.0}, range(10), 10),
        ],
    )
    def test_stops_at_the_threshold(self, options, values, epochs):
        """The training stops at the evaluation whose metric is better than the threshold."""
        assert batches(make(ThresholdStopper("Score", "eval", **options), evaluation=list(values))) == 5 * epochs

    def test_training_metric(self):
        """With the training label, the metric is checked after each epoch."""
        assert batches(make(ThresholdStopper("Score", "train", 1.5), train=[1, 2, 3])) == 10

    @pytest.mark.parametrize(("monitor", "parts"), [("Score", None), ("Score/right", ("left", "right"))])
    def test_stop_on_batch(self, monitor, parts):
        """A training metric may stop the training within an epoch."""
        stopper = ThresholdStopper(monitor, "train", 2.5, stop_on_batch=True)

        assert batches(make(stopper, train=[1, 2, 3, 4], parts=parts)) == 3

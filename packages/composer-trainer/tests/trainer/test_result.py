"""The result of fit, and the text of a trainer."""

import re

import attrs
import pytest
import torch

from composer.algorithms import EMA, LabelSmoothing, MixUp
from composer.callbacks import EarlyStopper
from composer.core import Timestamp
from composer.loggers import InMemoryLogger
from fixtures import make_loader, small_run


class TestFitResult:
    def test_steps_clock_and_reason(self):
        """A complete training reports its batches, its clock and that its duration is reached."""
        result = small_run(max_duration="2ep").fit()

        assert (result.steps, result.timestamp.batch, result.timestamp.epoch) == (10, 10, 2)
        assert result.reason == "max_duration='2ep' is reached"
        assert result.seconds > 0
        assert result.checkpoint is None

    def test_metrics_are_the_last_logged_values(self):
        """Loss and metrics have the names and the values that loggers receive."""
        log = InMemoryLogger()

        result = small_run(
            max_duration="2ep", eval_dataloader=make_loader(seed=1), train_metrics=None, loggers=log
        ).fit()

        assert {"loss/train/total", "metrics/eval/MulticlassAccuracy", "metrics/train/MulticlassAccuracy"} <= {
            *result.metrics
        }
        assert result.metrics == {name: float(log.most_recent_values[name]) for name in result.metrics}

    def test_algorithms(self):
        """The result and the plan have what each algorithm did, also after a further call."""
        trainer = small_run(max_duration="1ep", algorithms=[MixUp(), LabelSmoothing(0.1)])
        result = trainer.fit()

        assert result.acted == {"MixUp": (5, "times"), "LabelSmoothing": (5, "batches")}
        assert "algorithms   MixUp 5 times, LabelSmoothing 5 batches" in re.sub("  +", "   ", str(result))
        assert trainer.fit(duration="2ba").acted == trainer.engine.explain().acted
        assert trainer.engine.explain().acted["MixUp"] == (7, "times")

    def test_weights_of_the_model(self):
        """With averages, the result states that the model does not have them."""
        result = small_run(max_duration="1ep", algorithms=EMA("3ba")).fit()

        assert result.averaged_by == ["EMA"]
        assert "weights those of training; evaluated are the averages of EMA" in re.sub("  +", " ", str(result))
        assert "weights" not in str(small_run(max_duration="1ep").fit())

    def test_complete_training(self):
        """A training that was complete before has no steps."""
        trainer = small_run(max_duration="1ep")
        trainer.fit()

        result = trainer.fit()

        assert (result.steps, result.reason) == (0, "max_duration='1ep' was reached before")

    def early_stopper(self):
        return EarlyStopper("MulticlassAccuracy", "eval", comp=torch.less, min_delta=10.0, patience="1ep")

    def test_early_stopper(self):
        """The metric, its best value and the patience are named, and again by a further call, which trains nothing."""
        stopper = self.early_stopper()
        trainer = small_run(max_duration="9ep", eval_dataloader=make_loader(), callbacks=stopper)

        result, further = trainer.fit(), trainer.fit()

        reason = (
            f"EarlyStopper: eval/MulticlassAccuracy has not improved on {stopper.best:.4g} (batch 5) for "
            "2ep, more than patience='1ep'"
        )
        assert (result.steps, result.reason) == (15, f"{reason}; max_duration='9ep' is not reached")
        assert reason in str(result)
        assert "max_duration=&#x27;9ep&#x27; is not reached" in result._repr_html_()
        assert (further.steps, further.reason) == (0, reason)

    @pytest.mark.parametrize("options", [{"progress_bar": True}, {"log_to_console": True}])
    def test_early_end_is_logged(self, capsys, options):
        """The last line of the terminal has the reason."""
        trainer = small_run(max_duration="9ep", **options)
        trainer.engine.on("batch_end", lambda state, logger: state.stop_training("the disk is full"), every="3ba")

        trainer.fit()

        assert re.search(r"[tT]raining ended: the disk is full\n", capsys.readouterr().err)

    def test_checkpoint(self, tmp_path):
        """The newest checkpoint is the one that the end of the training has saved."""
        trainer = small_run(max_duration="2ep", save_folder=str(tmp_path))

        result = trainer.fit()

        assert result.checkpoint == trainer.saved_checkpoints[-1] == str(tmp_path / "ep2-ba10")

    def test_prints_as_a_table(self, tmp_path):
        """Each line is a name and a value; values are aligned, and entries without a value are left out."""
        result = small_run(max_duration="2ep", save_folder=str(tmp_path), run_name="first").fit()

        rows = dict(line.split(maxsplit=1) for line in str(result).splitlines())
        assert rows["run"] == "first"
        assert rows["clock"] == "epoch 2, batch 10, sample 40"
        assert rows["checkpoint"] == str(tmp_path / "ep2-ba10")
        assert float(rows["loss/train/total"]) == pytest.approx(result.metrics["loss/train/total"], rel=1e-3)
        assert "best" not in rows
        assert repr(result) == str(result)
        assert "epoch 0, batch 2, sample 0, token 7" in str(attrs.evolve(result, timestamp=Timestamp(batch=2, token=7)))

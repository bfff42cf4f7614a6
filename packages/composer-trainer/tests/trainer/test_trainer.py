"""The Trainer: wrong arguments and use, and what it gives to the model."""

import copy
import pickle

import pytest
import torch
from torch import nn

from composer.algorithms import EMA
from composer.core import Algorithm, Callback
from composer.distributed.environment import get_tensor_parallel_size, set_tensor_parallel_size
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from composer.trainer import Trainer
from fixtures import make_classifier, make_loader, runs, small_run


class TestErrors:
    def test_callback_errors_propagate(self):
        """The error propagates after callbacks were closed."""

        class Fails(Callback):
            closed = False

            def batch_end(self, state, logger):
                raise KeyError("on purpose")

            def close(self, state, logger):
                self.closed = True

        fails = Fails()
        trainer = small_run(callbacks=fails, max_duration="1ep")

        with pytest.raises(KeyError, match="on purpose"):
            trainer.fit()

        assert fails.closed
        with pytest.raises(RuntimeError, match="closed"):
            trainer.fit()

    def test_after_an_error(self, tmp_path):
        """After an error in a step, eval, predict and save_checkpoint work with algorithms, without callbacks."""
        seen, data = [], make_loader(seed=1)
        log = InMemoryLogger()

        class Fails(Callback):
            def before_backward(self, state, logger):
                if int(state.timestamp.batch) == 3:
                    raise OSError("on purpose")

            def eval_start(self, state, logger):
                seen.append(state)

        trainer = small_run(callbacks=Fails(), algorithms=EMA("1ba"), loggers=log, eval_dataloader=data, max_duration=1)
        with pytest.raises(OSError, match="on purpose"):
            trainer.fit()
        logged = len(log.data)
        values, outputs = trainer.eval()["eval"], trainer.predict(data)
        again = small_run(load_path=trainer.save_checkpoint(str(tmp_path / "one")), algorithms=EMA("1ba"))

        assert again.eval(data)["eval"] == values
        assert all(torch.equal(one, other) for one, other in zip(outputs, again.predict(data), strict=True))
        assert (seen, len(log.data), int(again.state.timestamp.batch)) == ([], logged, 3)

    def test_closed_trainer(self):
        """A trainer that was closed raises also if its training is complete."""
        trainer = small_run(max_duration="1ep")
        trainer.fit()
        trainer.close()

        with pytest.raises(RuntimeError, match="The engine is closed"):
            trainer.fit()

    def test_missing_data(self):
        """The error states the missing argument."""
        model = make_classifier()
        trainer = Trainer(
            model=model, optimizers=torch.optim.SGD(model.parameters(), lr=1), max_duration=1, progress_bar=False
        )

        with pytest.raises(ValueError, match="train_dataloader"):
            trainer.fit()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_duration": "0ep"}, "max_duration must be more than 0"),
            ({"max_duration": "0.5dur"}, "cannot be a fraction of itself"),
            ({"max_duration": "ten epochs"}, "number followed by a unit"),
            ({"scale_schedule_ratio": 0}, "scale_schedule_ratio must be more than 0"),
            ({"device_train_microbatch_size": 0}, "device_train_microbatch_size must be"),
            ({"device": "gpux"}, "device must be"),
            ({"device": "meta"}, "cannot be used here"),
            ({"train_dataloader": []}, "train_dataloader has no batches"),
            ({"eval_dataloader": []}, "The loader of 'eval' has no batches to evaluate on"),
            ({"train_subset_num_batches": 0}, "train_subset_num_batches must be"),
            ({"seed": -1}, "seed must be in"),
        ],
    )
    def test_values_out_of_range(self, options, message):
        """Values out of range raise at construction with their names."""
        with pytest.raises(ValueError, match=message):
            small_run(**options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"algorithms": [Algorithm]}, r"write Algorithm\(\)"),
            ({"callbacks": ["LRMonitor"]}, "callbacks must be Callback objects"),
            ({"loggers": ["file"]}, "loggers must be LoggerDestination objects"),
            ({"optimizers": ["SGD"]}, "optimizers must be torch.optim.Optimizer objects"),
            ({"schedulers": ["cosine"], "max_duration": 1}, "schedulers must be"),
            ({"train_dataloader": 3}, "dataloader must be an iterable"),
        ],
    )
    def test_values_of_wrong_types(self, options, message):
        """Values of wrong types raise with their names."""
        with pytest.raises(TypeError, match=message):
            small_run(**options).fit()

    def test_plain_module_raises(self):
        """A module without a loss raises; the error states how to wrap it."""
        with pytest.raises(TypeError, match="ComposerClassifier"):
            Trainer(model=nn.Linear(2, 2))

    def test_missing_optimizer_warns(self):
        """Without an optimizer a default is used, with a warning that states it."""
        trainer = small_run(optimizers=None, max_duration="1ba")

        with pytest.warns(UserWarning, match=r"SGD.*lr=0.1") as warned:
            trainer.fit()

        assert [warning.filename for warning in warned] == [__file__]
        assert trainer.state.optimizers[0].param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("use", ["fit", "eval", "predict", "save_checkpoint"])
def test_mesh_of_another_trainer(tmp_path, use):
    """A trainer counts the processes by its own mesh, also if another one was constructed after it."""
    with small_run(max_duration="1ba", eval_dataloader=make_loader()) as trainer:
        arguments = {"predict": (make_loader(),), "save_checkpoint": (str(tmp_path / "one"),)}
        set_tensor_parallel_size(2)  # as the construction of a trainer with a mesh does

        getattr(trainer, use)(*arguments.get(use, ()))

        assert get_tensor_parallel_size() == 1


class TestOptimizers:
    def test_optimizer_of_another_model_raises(self):
        """Its parameters are not in the model."""
        with pytest.raises(ValueError, match="SGD holds 4 parameters of 4 that are not the model's"):
            small_run(optimizers=torch.optim.SGD(make_classifier().parameters(), lr=1))

    def test_stale_optimizer_raises(self):
        """A layer that was replaced after the optimizer was created would not be trained."""
        model = make_classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        model.module[2] = nn.Linear(8, 3)

        with pytest.raises(ValueError, match="after the optimizer was made"):
            small_run(model=model, optimizers=optimizer)

    def test_partial_optimizer(self):
        """An optimizer with the last layer's parameters trains only those, with a warning that names others."""
        model = make_classifier()
        before = model.module[0].weight.detach().clone()

        with pytest.warns(UserWarning, match=r"do not hold 2 of the 4 .* such as 'module\.0\.weight'") as warned:
            trainer = small_run(model=model, optimizers=torch.optim.SGD(model.module[2].parameters(), lr=1))
        trainer.fit(duration="1ba")

        assert [warning.filename for warning in warned] == [runs.__file__]
        assert torch.equal(before, model.module[0].weight)


def test_replaced_loss():
    """The model's new loss is used from the next batch on."""
    used = []

    class Replacing(Callback):
        def batch_start(self, state, logger):
            if int(state.timestamp.batch) == 2:
                own = state.model.loss

                def loss(outputs, batch):
                    used.append(int(state.timestamp.batch))
                    return own(outputs, batch)

                state.model.loss = loss

    small_run(callbacks=Replacing(), max_duration="5ba").fit()

    assert used == [2, 3, 4]


class LogsItself(ComposerClassifier):
    """A model that logs in its loss, as models of MosaicML Composer do."""

    def loss(self, outputs, batch, *args, **kwargs):
        if self.logger is not None:
            self.logger.log_metrics({"scores/largest": outputs.max()})
        return super().loss(outputs, batch, *args, **kwargs)


class TestLoggerOfTheModel:
    def test_logs_with_the_trainer(self):
        """Within a trainer a model logs to its destinations; before and after it, it has no logger."""
        model, history = LogsItself(nn.Linear(4, 3), num_classes=3, train_metrics=[]), InMemoryLogger()
        assert model.logger is None
        trainer = small_run(model=model, loggers=history, max_duration="3ba")

        trainer.fit()

        assert [clock.counts.batch for clock, _ in history.data["scores/largest"]] == [0, 1, 2]
        trainer.close()
        assert model.logger is None

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
    def test_copies_have_no_logger(self, duplicate):
        """The logger, which refers to the run, is neither copied nor pickled."""
        model = LogsItself(nn.Linear(4, 3), num_classes=3, train_metrics=[])
        trainer = small_run(model=model)

        again = duplicate(model)

        assert (model.logger, again.logger) == (trainer.logger, None)
        assert again.state_dict().keys() == model.state_dict().keys()

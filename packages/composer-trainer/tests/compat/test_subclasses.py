"""What programs for MosaicML Composer override: former hooks are called, others are an error."""

import atexit

import pytest
import torch
from torch.nn.functional import cross_entropy

from composer import Trainer
from composer.callbacks import CheckpointSaver, EarlyStopper, Generate
from composer.compat.files import PartialFilePath
from composer.core import Callback, Event
from composer.loggers import InMemoryLogger, MLFlowLogger, NeptuneLogger, SlackLogger, WandBLogger
from composer.metrics import LanguageCrossEntropy
from fixtures import make_classifier, make_loader, small_run, trained


class AlsoText(CheckpointSaver):
    """Has a second name for each checkpoint."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        assert self.latest_remote_file_name is None
        self.text_filename = PartialFilePath(f"text_{self.filename.filename.split('.pt')[0]}", self.filename.folder)
        self.found, self.texts = [], []

    def _save_checkpoint(self, state, logger):
        super()._save_checkpoint(state, logger)
        self.found.append(len(self.saved_checkpoints))
        self.texts.append(self.text_filename.format(state))

    def state_dict(self):
        return super().state_dict() | {"texts": self.texts}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.texts = state["texts"]


def test_each_save_calls_the_hook(tmp_path):
    """The override runs at each save, after the checkpoint is written, and its state is saved and loaded."""
    saver = AlsoText(str(tmp_path), "ba{batch}", save_interval="2ba")

    trained(max_duration="5ba", callbacks=saver)

    assert saver.found == [1, 2, 3]
    assert saver.texts == [f"{tmp_path}/text_ba{batch}" for batch in (2, 4, 5)]
    assert saver.last_checkpoint_batch == "5ba"
    assert [int(clock.batch) for clock in saver.all_saved_checkpoints_to_timestamp.values()] == [2, 4, 5]
    again = AlsoText(str(tmp_path / "again"), save_interval="2ba")
    small_run(max_duration="5ba", callbacks=again, load_path=tmp_path / "ba4")
    assert again.texts == saver.texts[:1]


def test_an_override_that_saves_something_else(tmp_path):
    """Without ``super()`` only the override writes, also when the program asks for a save."""

    class OnlyText(CheckpointSaver):
        def _save_checkpoint(self, state, logger):
            (tmp_path / f"ba{int(state.timestamp.batch)}.txt").touch()

    trainer = trained(max_duration="5ba", callbacks=OnlyText(str(tmp_path), save_interval="3ba"))
    (tmp_path / "ba5.txt").unlink()
    trainer.save_checkpoint_to_save_folder()

    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == ["ba3.txt", "ba5.txt"]


def test_a_saver_of_the_best_metric(tmp_path):
    """Its hook of the evaluation saves, is called after these alone, and what it adds to the state is restored."""

    class SavesBest(CheckpointSaver):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.latest_filename, self.best, self.calls = None, None, []

        def eval_end(self, state, logger):
            value = state.eval_metric_values["MulticlassAccuracy"].item()
            self.calls.append(int(state.timestamp.batch))
            if self.best is None or value > self.best:
                self.best = value
                self._save_checkpoint(state, logger)

        def batch_checkpoint(self, state, logger):
            """Save nothing."""

        epoch_checkpoint = batch_checkpoint

        def state_dict(self):
            state = super().state_dict()
            pairs = state["all_saved_checkpoints_to_timestamp"]
            return state | {"all_saved_checkpoints_to_timestamp": [(*pair, {"best": self.best}) for pair in pairs]}

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.best = state["all_saved_checkpoints_to_timestamp"][-1][-1]["best"]

    saver = SavesBest(str(tmp_path), "best.pt", overwrite=True)
    trained(eval_dataloader=make_loader(), callbacks=saver, eval_interval="2ba", max_duration="5ba")

    state = torch.load(tmp_path / "best.pt", weights_only=True)["state"]
    [(name, clock, metric)] = state["callbacks"]["SavesBest"]["all_saved_checkpoints_to_timestamp"]
    assert saver.calls[:2] == [2, 4]
    assert len(saver.calls) == len({*saver.calls})
    assert (name, metric["best"]) == (str(tmp_path / "best.pt"), saver.best)
    assert clock["batch"] in saver.calls
    again = SavesBest(str(tmp_path), "best.pt", overwrite=True)
    small_run(max_duration="5ba", eval_dataloader=make_loader(), callbacks=again, load_path=tmp_path / "best.pt")
    assert again.best == saver.best
    assert int(again.all_saved_checkpoints_to_timestamp[name].batch) == clock["batch"]


def test_the_interval_of_a_saver_is_a_function(tmp_path):
    """An algorithm asks whether the saver is due, as for its weights in the checkpoint."""
    asked = []

    class Listens(Callback):
        def run_event(self, event, state, logger):
            if event.value.endswith("_checkpoint") and saver.save_interval(state, event):
                asked.append((event, int(state.timestamp.batch)))

    saver = CheckpointSaver(str(tmp_path), save_interval="2ba")
    trained(max_duration="5ba", callbacks=[saver, Listens()])

    batches = [(Event.BATCH_CHECKPOINT, batch) for batch in (2, 4, 5)]
    assert [one for one in asked if one[0] is Event.BATCH_CHECKPOINT] == batches


def test_a_metric_with_a_loss_of_its_own():
    """A subclass replaces the loss, and another one adds to the states itself."""

    class Doubled(LanguageCrossEntropy):
        def __init__(self):
            super().__init__()
            self.loss_fn = lambda logits, ids: 2 * cross_entropy(logits, ids, reduction="sum")

    class Own(LanguageCrossEntropy):
        def update(self, output, target):
            self.sum_loss += self.loss_fn(output["logits"].view(-1, 5), target.view(-1))
            self.total_items += target.numel()

        def compute(self):
            return self.sum_loss / self.total_items

    logits, ids = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = cross_entropy(logits.view(-1, 5), ids.view(-1))
    for metric, factor in ((Doubled(), 2), (Own(), 1)):
        metric.update({"logits": logits}, ids)
        assert metric.compute().item() == pytest.approx(factor * expected.item(), rel=1e-6)
        metric.reset()
        assert metric.total_items == 0


def test_an_override_that_nothing_calls():
    """The error is raised where the class is defined."""
    with pytest.raises(TypeError, match=r"Mine._rotate_checkpoints would be called by nothing: override _save_check"):
        type("Mine", (CheckpointSaver,), {"_rotate_checkpoints": lambda self: None})
    with pytest.raises(TypeError, match=r"Patient._update_stopper_state .*: override judge\(self, value, state\)"):
        type("Patient", (EarlyStopper,), {"_update_stopper_state": lambda self, state: None})
    theirs = type("EarlyStopper", (Callback,), {"_update_stopper_state": lambda self, state: None})
    type("Patient", (theirs,), {"_update_stopper_state": lambda self, state: None})  # a class of the program


@pytest.mark.parametrize(
    ("base", "hook"),
    [
        (WandBLogger, "_set_is_in_atexit"),
        (MLFlowLogger, "_start_mlflow_run"),
        (NeptuneLogger, "_sanitize_metrics"),
        (SlackLogger, "_log_to_buffer"),
    ],
)
def test_overrides_of_loggers(base, hook):
    """The former hooks of loggers are an error, too."""
    with pytest.raises(TypeError, match=f"Mine.{hook} would be called by nothing"):
        type("Mine", (base,), {hook: lambda self, *args: None})


def test_generate_is_called():
    """An override generates itself, after the interval and at the end, with any model."""
    generated = []

    class Own(Generate):
        def generate(self, state, logger):
            generated.append(int(state.timestamp.batch))

    trained(callbacks=Own(["a"], "2ba"))

    assert generated == [2, 4, 5]


def test_arguments_of_the_constructor_of_a_callback():
    """A constructor may pass its arguments on; a callback without one takes none."""

    class PassesOn(Callback):
        def __init__(self, *args, **kwargs):
            super().__init__(self, *args, **kwargs)

    class Plain(Callback):
        """A callback without a constructor."""

    PassesOn(1, two=2)
    with pytest.raises(TypeError, match="Plain takes no arguments"):
        Plain(typo=1)


def test_values_and_clocks_have_the_types_of_composer():
    """Logged numbers have ``item()``, the epoch of an iteration can be assigned, the state of data is ignored."""
    history = InMemoryLogger()
    trainer = trained(loggers=history)
    assert history.data["loss/train/total"][-1][1].item() == history.data["loss/train/total"][-1][1]

    trainer.state.timestamp.epoch_in_iteration = 2
    assert trainer.state.timestamp.epoch_in_iteration == "2ep"
    with pytest.warns(DeprecationWarning, match="has no effect: a checkpoint contains the place"):
        trainer.state._dataset_state_dict = dict


def test_a_method_that_is_set_on_a_callback():
    """A program replaces a hook of a callback after the trainer was constructed."""
    seen, callback = [], Callback()
    trainer = small_run(max_duration="2ba", callbacks=callback)

    callback.batch_end = lambda state, logger: seen.append(int(state.timestamp.batch))
    trainer.fit()

    assert seen == [1, 2]


def test_a_program_deletes_what_a_trainer_holds():
    """Attributes of trainer and state can be listed and deleted, after the engine is unregistered from ``atexit``."""
    trainer = Trainer(model=make_classifier(), eval_dataloader=make_loader())
    trainer.close()

    atexit.unregister(trainer.engine._close)
    for key in list(vars(trainer.state)):
        delattr(trainer.state, key)
    for key in list(vars(trainer)):
        delattr(trainer, key)

    assert vars(trainer) == {}

"""When a save is due; complete trainings are in ``test_saver.py``."""

from composer.checkpoint.due import DueSaves
from composer.core import Event, Interval


def test_end_of_training(runs):
    """The end of the training is due, unless the interval is 0."""
    due = [DueSaves(Interval.named("save_interval", every), None) for every in ("1ep", 0)]

    assert [one.is_due(runs.make(), Event.FIT_END) for one in due] == [True, False]


def test_function(runs):
    """A function decides instead of an interval."""
    due = DueSaves(lambda state, event: event is Event.EPOCH_CHECKPOINT, None)

    assert due.is_due(runs.make(), Event.EPOCH_CHECKPOINT)
    assert not due.is_due(runs.make(), Event.BATCH_CHECKPOINT)

"""The garbage collector runs where it is due only, and is restored after the training."""

import gc

import pytest

from composer.callbacks import GarbageCollector
from composer.core import Callback
from fixtures import make_loader, record, trained


class Collections(Callback):
    """Records the batch, counted from 0, of each collection; before others, so that it sees only those of batches."""

    def __init__(self):
        self.batches, self.begun = [], []

    def fit_start(self, state, logger):
        """Observe the collector."""
        gc.callbacks.append(self.observe)

    def batch_start(self, state, logger):
        """Note the number of the batch."""
        self.begun.append(int(state.timestamp.batch))

    def observe(self, phase, info):
        """Record a collection."""
        if phase == "start" and self.begun:
            self.batches.append(self.begun[-1])

    def fit_end(self, state, logger):
        """Observe no longer."""
        gc.callbacks.remove(self.observe)


@pytest.fixture(autouse=True)
def _restored():
    """Leave the collector as it was."""
    yield
    gc.callbacks[:] = [one for one in gc.callbacks if not isinstance(getattr(one, "__self__", None), Collections)]
    gc.unfreeze()
    gc.enable()


class TestWhen:
    def test_interval_and_end_of_an_epoch(self):
        """It collects after every second batch and at the end of each epoch, and at no other time."""
        observed = Collections()
        threshold = gc.get_threshold()
        gc.set_threshold(1)
        try:
            trained(callbacks=[observed, GarbageCollector("2ba")], max_duration="2ep")
        finally:
            gc.set_threshold(*threshold)

        assert observed.batches == [1, 3, 4, 5, 7, 9, 9]

    def test_before_an_evaluation(self):
        """It collects before each evaluation."""
        observed = Collections()

        trained(
            callbacks=[observed, GarbageCollector("0ba")],
            max_duration="4ba",
            eval_dataloader=make_loader(),
            eval_interval="2ba",
        )

        assert observed.batches == [1, 3]

    def test_before_a_checkpoint(self, tmp_path):
        """It collects before each checkpoint that is saved at an interval."""
        observed = Collections()

        trained(
            callbacks=[observed, GarbageCollector("0ba")],
            max_duration="5ba",
            save_folder=str(tmp_path),
            save_interval="2ba",
        )

        assert observed.batches == [1, 3, 4]


class TestRestored:
    @pytest.mark.parametrize("is_enabled", [True, False])
    def test_after_the_training(self, is_enabled):
        """The collector is disabled in the training, and as before after it."""
        during = record("batch_start", lambda state: gc.isenabled())
        (gc.enable if is_enabled else gc.disable)()

        trained(callbacks=[GarbageCollector(), during])

        assert set(during.values) == {False}
        assert gc.isenabled() is is_enabled
        assert gc.get_freeze_count() == 0

    def test_after_an_error(self):
        """An error in the training restores it, too."""

        def fail(state):
            raise RuntimeError("of the user")

        with pytest.raises(RuntimeError, match="of the user"):
            trained(callbacks=[GarbageCollector(), record("after_loss", fail)])

        assert gc.isenabled()
        assert gc.get_freeze_count() == 0


class TestBadInput:
    @pytest.mark.parametrize(
        ("interval", "error", "message"),
        [
            ("-1ba", ValueError, "interval must be 0"),
            ("often", ValueError, "interval must be"),
            (1.5, TypeError, "interval must be"),
        ],
    )
    def test_interval(self, interval, error, message):
        """What is no length of time raises."""
        with pytest.raises(error, match=message):
            GarbageCollector(interval)

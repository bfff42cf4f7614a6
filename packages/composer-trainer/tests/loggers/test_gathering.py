"""When loggers that buffer values open their run and write."""

import pytest

from composer.loggers.gathering import GatheringLogger


class Gathering(GatheringLogger):
    """Records when it is opened and when it writes."""

    def __init__(self, flush_interval=2, every=None):
        super().__init__(every=every, flush_interval=flush_interval)
        self.calls = []

    def log_metrics(self, metrics, step=None):
        self._records.append(step)

    def open(self, state):
        if not self._is_open:
            self.calls.append("open")
        self._is_open = True

    def write_records(self, records):
        self.calls.append(records)


def test_written_at_intervals_and_ends(make_loop):
    """Of three batches per epoch the second is due; the end of an epoch and of the training write, too."""
    logger = Gathering()

    make_loop(logger).fit()
    logger.log_metrics({}, step="end")
    logger.fit_end(None, None)

    assert logger.calls == ["open", [0, 1], [2], [3, 4], [5], ["end"]]


def test_evaluation_without_training_opens_and_writes(make_loop):
    """Each evaluation writes what it has logged."""
    logger = Gathering(flush_interval=100)

    make_loop(logger).evaluate()

    assert logger.calls == ["open", [0]]


def test_failures_are_reported_in_a_run_and_raised_outside():
    """Without a run there is nobody to report an error to."""

    def fail():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        Gathering().report_failure_of("flush", fail)


@pytest.mark.parametrize(("options", "name"), [({"flush_interval": 0}, "flush_interval"), ({"every": "-1ba"}, "every")])
def test_bad_settings(options, name):
    """Values out of range raise with their names."""
    with pytest.raises(ValueError, match=name):
        Gathering(**options)

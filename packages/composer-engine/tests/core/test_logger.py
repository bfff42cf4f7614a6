"""The logger and its destinations."""

import warnings

import pytest

from composer.core import Logger, LoggerDestination, State, Timestamp, Trace
from composer.core.logger import format_metric_value


class Memory(LoggerDestination):
    """Keeps what it is given."""

    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step=None):
        self.logged.append(("metrics", metrics, step))

    def log_hyperparameters(self, hyperparameters):
        self.logged.append(("hyperparameters", hyperparameters))

    def log_traces(self, traces):
        self.logged.append(("traces", traces))

    def log_table(self, columns, rows, name="Table", step=None):
        self.logged.append(("table", columns, rows, name, step))

    def log_images(self, images, name="Images", channels_last=False, step=None, **details):
        self.logged.append(("images", images, name, channels_last, step, details))

    def upload_file(self, state, remote_file_name, file_path, *, overwrite=False):
        self.logged.append(("file", remote_file_name, str(file_path), overwrite))

    def can_upload_files(self):
        return True


class Broken(LoggerDestination):
    """Fails to store."""

    def log_metrics(self, metrics, step=None):
        raise OSError("disk full")

    def log_hyperparameters(self, hyperparameters):
        raise ValueError("no")


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def logger(memory):
    state = State(model=None)
    state.timestamp = Timestamp(batch=7)
    return Logger(state, memory)


def test_everything_reaches_the_destination(logger, memory):
    """Each kind of thing arrives as it was given, with the batch as its step."""
    logger.log_metrics({"loss": 1})
    logger.log_metrics({"loss": 2}, step=3)
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_traces({"t": Trace("A")})
    logger.log_table(["a"], [[1]], name="T")
    logger.log_images("pixels", channels_last=True, use_table=False)
    logger.upload_file("there", "here", overwrite=True)

    assert memory.logged == [
        ("metrics", {"loss": 1}, 7),
        ("metrics", {"loss": 2}, 3),
        ("hyperparameters", {"lr": 0.1}),
        ("traces", {"t": Trace("A")}),
        ("table", ["a"], [[1]], "T", 7),
        ("images", "pixels", "Images", True, 7, {"use_table": False}),
        ("file", "there", "here", True),
    ]


def test_destinations_that_store_nothing_take_everything(logger):
    """A destination overrides what it can take and ignores the rest."""
    logger.destinations = [LoggerDestination()]

    logger.log_metrics({"loss": 1})
    logger.log_table(["a"], [])
    logger.log_images(None)
    logger.upload_file("there", "here")

    assert not logger.has_file_upload_destination()


def test_failure_is_reported_once_and_the_run_goes_on(logger, memory):
    """A full disk is told once for each kind of thing, and the other destinations get everything."""
    logger.destinations.insert(0, Broken())

    with pytest.warns(RuntimeWarning, match="Broken.log_metrics failed.*training goes on.*OSError: disk full"):
        logger.log_metrics({"loss": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger.log_metrics({"loss": 2})
    with pytest.warns(RuntimeWarning, match="Broken.log_hyperparameters failed"):
        logger.log_hyperparameters({"lr": 0.1})

    assert [entry[1] for entry in memory.logged] == [{"loss": 1}, {"loss": 2}, {"lr": 0.1}]


def test_failures_of_two_destinations_are_both_reported(logger):
    """Each destination has its own report."""
    logger.destinations = [Broken(), Broken()]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logger.log_metrics({"loss": 1})
        logger.log_metrics({"loss": 2})

    assert len(caught) == 2


def test_report_points_to_who_logged(logger):
    """The warning names the line that logged, not the logger's inside."""
    logger.destinations = [Broken()]

    with pytest.warns(RuntimeWarning) as caught:
        logger.log_metrics({"loss": 1})

    assert caught[0].filename == __file__


def test_interrupt_is_not_swallowed(logger):
    """Ctrl-C ends the run, also while something is stored."""

    class Interrupted(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            raise KeyboardInterrupt

    logger.destinations.append(Interrupted())

    with pytest.raises(KeyboardInterrupt):
        logger.log_metrics({"loss": 1})


@pytest.mark.parametrize("wrong", [print, Memory, "file.txt"])
def test_only_destinations_are_taken(wrong):
    """A function or a class is no destination."""
    with pytest.raises(TypeError, match="loggers must be LoggerDestination objects"):
        Logger(State(model=None), [wrong])


def test_files_are_only_fetched_where_they_are_kept():
    """A destination without files says so."""
    with pytest.raises(NotImplementedError, match="LoggerDestination keeps no files and cannot fetch 'a'"):
        LoggerDestination().download_file("a", "b")


@pytest.mark.parametrize(("value", "text"), [(0.123456, "0.1235"), (3, "3"), (1e-7, "1e-07"), ("word", "word")])
def test_format_metric_value(value, text):
    """Numbers are shown with four digits."""
    assert format_metric_value(value) == text

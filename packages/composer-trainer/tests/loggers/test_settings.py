"""Settings that loggers reject at construction."""

import inspect
import re

import pytest

from composer import loggers
from composer.core import LoggerDestination
from composer.loggers import (
    CometMLLogger,
    FileLogger,
    MLFlowLogger,
    SlackLogger,
    TensorboardLogger,
    TrackioLogger,
    WandBLogger,
)

CLASSES = [one for one in vars(loggers).values() if inspect.isclass(one) and issubclass(one, LoggerDestination)]
REQUIRED = {
    SlackLogger: {"include_keys": "loss/*", "slack_logging_api_key": "key", "channel_id": "channel"},
    TrackioLogger: {"project": "settings"},
}


def _with(kind):
    """Return each logger with each of its parameters that is annotated with ``kind``."""
    return [
        (logger, name)
        for logger in CLASSES
        for name, parameter in inspect.signature(logger).parameters.items()
        if parameter.annotation == kind
    ]


def _id(one):
    return one if isinstance(one, str) else one.__name__


@pytest.mark.parametrize(("logger", "name"), _with("bool"), ids=_id)
def test_flags_reject_strings(logger, name):
    """A string for a flag raises, as every non-empty string is truthy."""
    with pytest.raises(TypeError, match=f"^{name} must be True or False, got 'no'"):
        logger(**REQUIRED.get(logger, {}) | {name: "no"})


@pytest.mark.parametrize(("logger", "name"), _with("int"), ids=_id)
def test_counts_reject_strings(logger, name):
    """A string for a number raises with the parameter's name."""
    with pytest.raises(TypeError, match=f"^{name} must be .*, got '10'"):
        logger(**REQUIRED.get(logger, {}) | {name: "10"})


@pytest.mark.parametrize(
    ("logger", "name", "expected"),
    [
        (FileLogger, "filename", "a string or a path"),
        (FileLogger, "remote_file_name", "a string or a path"),
        (TensorboardLogger, "log_dir", "a string or a path"),
        (WandBLogger, "tags", "a string or a list of strings"),
        (WandBLogger, "init_kwargs", "None or a dictionary whose keys are strings"),
        (CometMLLogger, "exp_kwargs", "None or a dictionary whose keys are strings"),
        (MLFlowLogger, "tags", "None or a dictionary whose keys are strings"),
        (MLFlowLogger, "rename_metrics", "None or a dictionary whose keys are strings"),
        (MLFlowLogger, "ignore_metrics", "a string or a list of strings"),
        (SlackLogger, "include_keys", "a string or a list of strings"),
        (SlackLogger, "client_kwargs", "None or a dictionary whose keys are strings"),
    ],
    ids=_id,
)
def test_wrong_types_raise(logger, name, expected):
    """A value of the wrong type raises with the parameter's name."""
    with pytest.raises(TypeError, match=f"^{name} must be {re.escape(expected)}, got 5"):
        logger(**REQUIRED.get(logger, {}) | {name: 5})


def test_single_string_is_a_list_of_one():
    """A single string is not split into letters."""
    logger = MLFlowLogger(ignore_metrics="loss/*", log_system_metrics=False)

    assert logger.ignore_metrics == ["loss/*"]

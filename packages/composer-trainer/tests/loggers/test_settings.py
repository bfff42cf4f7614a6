"""Settings that loggers refuse at construction."""

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
    WandBLogger,
)

CLASSES = [one for one in vars(loggers).values() if inspect.isclass(one) and issubclass(one, LoggerDestination)]
REQUIRED = {SlackLogger: {"include_keys": "loss/*", "slack_logging_api_key": "key", "channel_id": "channel"}}


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
def test_flags_accept_no_text(logger, name):
    """A text for a flag is an error, as every text counts as true."""
    with pytest.raises(TypeError, match=f"^{name} must be True or False, got 'no'"):
        logger(**REQUIRED.get(logger, {}) | {name: "no"})


@pytest.mark.parametrize(("logger", "name"), _with("int"), ids=_id)
def test_counts_accept_no_text(logger, name):
    """A text for a number is refused by the parameter's name."""
    with pytest.raises(TypeError, match=f"^{name} must be .*, got '10'"):
        logger(**REQUIRED.get(logger, {}) | {name: "10"})


@pytest.mark.parametrize(
    ("logger", "name", "expected"),
    [
        (FileLogger, "filename", "a text or a path"),
        (FileLogger, "remote_file_name", "a text or a path"),
        (TensorboardLogger, "log_dir", "a text or a path"),
        (WandBLogger, "tags", "a text or a list of texts"),
        (WandBLogger, "init_kwargs", "None or a dictionary whose keys are texts"),
        (CometMLLogger, "exp_kwargs", "None or a dictionary whose keys are texts"),
        (MLFlowLogger, "tags", "None or a dictionary whose keys are texts"),
        (MLFlowLogger, "rename_metrics", "None or a dictionary whose keys are texts"),
        (MLFlowLogger, "ignore_metrics", "a text or a list of texts"),
        (SlackLogger, "include_keys", "a text or a list of texts"),
        (SlackLogger, "client_kwargs", "None or a dictionary whose keys are texts"),
    ],
    ids=_id,
)
def test_other_kinds_are_refused(logger, name, expected):
    """A number for a name, a list or a dictionary is refused by the parameter's name."""
    with pytest.raises(TypeError, match=f"^{name} must be {re.escape(expected)}, got 5"):
        logger(**REQUIRED.get(logger, {}) | {name: 5})


def test_one_name_is_a_list_of_one():
    """A single text is not split into its letters."""
    logger = MLFlowLogger(ignore_metrics="loss/*", log_system_metrics=False)

    assert logger.ignore_metrics == ["loss/*"]

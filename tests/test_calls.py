"""The calls of our own functions in a step, a save and a load do not increase unnoticed."""

import tomllib
from pathlib import Path

import pytest

from composer.core import Callback
from count_calls import calls_in_a_step, count

LIMITS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["tool"]["composer-calls"]


@pytest.fixture(scope="module")
def numbers():
    """Count once."""
    return count()


@pytest.mark.parametrize("name", LIMITS)
def test_calls_are_within_the_limits(name, numbers):
    """A number that has changed is written to pyproject.toml, with the reason in the commit."""
    assert numbers[name] <= LIMITS[name]


def test_a_further_call_in_a_step_is_counted(numbers):
    """A callback that looks at one property at each batch raises the number."""

    class Looks(Callback):
        def batch_end(self, state, logger):
            state.component_key(self)

    assert calls_in_a_step(callbacks=Looks()) >= numbers["step-calls"] + 1

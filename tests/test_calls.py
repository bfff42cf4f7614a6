"""The calls of our own functions in a step, a save and a load do not increase unnoticed."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("count_calls.py")
LIMITS = tomllib.loads((PROGRAM.parents[1] / "pyproject.toml").read_text())["tool"]["composer-calls"]


@pytest.fixture(scope="module")
def numbers():
    """Count in a process of its own, whose calls do not depend on other tests."""
    written = subprocess.run([sys.executable, PROGRAM, "--json"], capture_output=True, text=True, check=True).stdout
    return json.loads(written.splitlines()[-1])


@pytest.mark.parametrize("name", LIMITS)
def test_calls_are_within_the_limits(name, numbers):
    """A number that has changed is written to pyproject.toml, with the reason in the commit."""
    assert numbers[name] <= LIMITS[name]


def test_a_further_call_in_a_step_is_counted(numbers):
    """A callback that calls one function at each batch raises the number."""
    assert numbers["step-calls with a callback"] >= numbers["step-calls"] + 1

"""The calls of our own functions in a step, a save and a load do not increase unnoticed."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("count_calls.py")
STEP = PROGRAM.with_name("count_step.py")
TOOLS = tomllib.loads((PROGRAM.parents[1] / "pyproject.toml").read_text())["tool"]
LIMITS, ABOVE = TOOLS["composer-calls"], TOOLS["composer-calls-above-a-loop"]
RELEASE = ABOVE.pop("torch")


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


@pytest.fixture(scope="module")
def above_a_loop():
    """Count in one process and in two."""
    if not torch.__version__.startswith(f"{RELEASE}."):
        pytest.skip(f"the numbers are those of torch {RELEASE}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", STEP]
    counted = {}
    for one in ([sys.executable, STEP], command):
        counted |= json.loads(subprocess.run(one, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    return counted


@pytest.mark.parametrize("name", ABOVE)
def test_a_step_has_no_further_calls(name, above_a_loop):
    """Python and C calls above a plain loop are within the limits."""
    python, c = map(round, above_a_loop[name])

    assert python <= ABOVE[name][0]
    assert c <= ABOVE[name][1]


def test_a_property_in_a_step_is_counted(above_a_loop):
    """A callback that reads one property at each batch makes one call more."""
    assert above_a_loop["planted"] == [1, 0]

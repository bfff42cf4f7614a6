"""Programs of tests run in forks of two servers as in processes of torchrun."""

import os
import time

import pytest

from fixtures.processes import run_processes

PROGRAM = """
import atexit, os, sys
import torch
import composer

atexit.register(print, "at exit")
ranks = torch.zeros(2, dtype=torch.int64)
torch.distributed.init_process_group("gloo")
ranks[torch.distributed.get_rank()] = int(os.environ["LOCAL_RANK"]) + 1
torch.distributed.all_reduce(ranks)
print(ranks.tolist(), sys.argv[1:], os.getcwd(), os.environ["COLOUR"], __name__, hash("text"))
if "fails" in sys.argv and os.environ["RANK"] == "1":
    raise KeyError("the labels")
if "fails" in sys.argv:
    torch.distributed.barrier()
"""


@pytest.fixture
def program(tmp_path):
    """Return the path of a program for two processes."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_a_failed_process_ends_the_others(program, tmp_path):
    """The error has the codes and outputs; what waits ends or is killed, and the next test starts other programs."""
    start = time.monotonic()

    with pytest.raises(AssertionError, match=r"exit codes by rank: \{.*1: 1\}(.|\n)*KeyError: 'the labels'"):
        run_processes(program, 2, "fails", COLOUR="blue")

    assert time.monotonic() - start < 200  # its timeout is 300


def test_processes_meet(program, tmp_path):
    """Each has its arguments, folder and variables, and ends as a program does; they hash strings differently."""
    before = dict(os.environ)

    first, second = run_processes(program, 2, "a", 1, cwd=tmp_path, COLOUR="blue")

    expected = f"[1, 2] ['a', '1'] {tmp_path} blue __main__ "
    assert first.startswith(expected)
    assert second.startswith(expected)
    assert first.endswith("at exit\n")
    assert first != second
    assert dict(os.environ) == before


def test_one_process_is_alone(tmp_path):
    """It has no variables of torchrun."""
    path = tmp_path / "program.py"
    path.write_text("import os; print([name for name in os.environ if 'RANK' in name or 'WORLD' in name])")

    assert run_processes(path, 1) == ["[]\n"]


def test_a_killed_process_is_an_error(tmp_path):
    """So is one that has not ended in time."""
    path = tmp_path / "program.py"
    path.write_text("import os, sys, time; time.sleep(100) if sys.argv[1:] else os.kill(os.getpid(), 9)")

    with pytest.raises(AssertionError, match=r"exit codes by rank: \{0: -9\}"):
        run_processes(path, 1)
    with pytest.raises(AssertionError, match=r"exit codes by rank: \{\}"):
        run_processes(path, 1, "waits", timeout=1)

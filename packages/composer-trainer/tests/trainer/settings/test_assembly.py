"""The parts of a trainer are closed once, also after an error, and processes have one precision."""

import pytest

from composer.core import Callback
from fixtures import small_run
from fixtures.processes import run_processes


def test_error_at_init_closes_callbacks():
    """Callbacks are closed after an error at INIT."""
    closed = []

    class Fails(Callback):
        def init(self, state, logger):
            raise LookupError("on purpose")

        def close(self, state, logger):
            closed.append(True)

    with pytest.raises(LookupError, match="on purpose"):
        small_run(callbacks=Fails())

    assert closed == [True]


PROGRAM = """
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
import torch
from composer import Trainer
from composer.models import ComposerClassifier
try:
    Trainer(model=ComposerClassifier(torch.nn.Linear(2, 2), 2), precision=["fp32", "amp_fp16"][rank])
except ValueError as error:
    print(error)
"""


def test_different_precisions_raise_in_each_process(tmp_path):
    """The error has the precisions of all processes."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    printed = run_processes(program, 2)

    assert printed == ["precision must be the same in every process, got fp32, amp_fp16 by rank.\n"] * 2

"""The parts of a trainer are closed once, also after an error, and processes have equal settings."""

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
for differing in (
    {"precision": ["fp32", "amp_fp16"]},
    {"max_duration": ["1ep", "2ep"]},
    {"save_folder": ["runs", None]},
    {"parallelism_config": [{"fsdp": {}}, None]},
):
    arguments = {name: values[rank] for name, values in differing.items()}
    try:
        Trainer(model=ComposerClassifier(torch.nn.Linear(2, 2), 2), **arguments)
    except ValueError as error:
        print(str(error).partition(". ")[0])
"""


def test_different_arguments_raise_in_each_process(tmp_path):
    """The error has the argument's name and both values, in all processes."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    printed = [text.splitlines() for text in run_processes(program, 2)]

    assert printed[0] == printed[1]
    assert printed[0][:2] == [
        "precision must be the same in every process, got fp32 in process 0 and amp_fp16 in process 1",
        "max_duration must be the same in every process, got 1ep in process 0 and 2ep in process 1",
    ]
    assert printed[0][2].startswith("save_folder and save_interval must be the same in every process")
    assert printed[0][3].startswith("parallelism_config['fsdp'] must be the same in every process")

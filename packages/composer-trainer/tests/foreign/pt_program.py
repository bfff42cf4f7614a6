"""Programs with checkpoints that are files: two processes of DDP, then of FSDP2; and one that is killed."""

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from test_pt_files import NAMES, make_trainer

from composer.algorithms import EMA
from composer.checkpoint import find_checkpoints
from composer.checkpoint.finding import open_checkpoint
from composer.diagnostics import check_exact_resume
from composer.distributed import get_global_rank
from composer.foreign import pt_files


def processes(folder):
    """Compare the batches of each process with those of a run without a stop, and continue with a sharded model."""
    make = lambda **settings: make_trainer(2, algorithms=EMA(half_life="2ba"), device="cpu", **settings)  # noqa: E731
    check_exact_resume(make, stops=["2ba"], folder=folder / "ddp")
    content = torch.load(folder / "ddp" / "stop0" / "latest-rank0.pt", weights_only=True)
    assert len(content["processes"]) == 1  # that of the other process

    options = {"parallelism_config": {"fsdp": {}}, "device": "cpu", "algorithms": EMA(half_life="2ba"), **NAMES}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = folder / "ddp" / "stop0" / "ep0-ba2-rank0.pt"
        trainer = make_trainer(2, save_folder=str(folder / "fsdp"), load_path=path, **options)
    assert any("is a folder and no file, because each process writes its part" in str(one.message) for one in caught)
    with trainer:
        trainer.fit()
    if get_global_rank() == 0:
        [_, last] = find_checkpoints(folder / "fsdp")
        assert Path(last.path).is_dir()
        sharded = open_checkpoint(last.path).tensors("model.safetensors")
        whole = torch.load(folder / "ddp" / "whole" / "latest-rank0.pt", weights_only=True)["state"]
        trained = dict(whole["algorithms"])["EMA"]["ema_model"]["named_parameters_dict"]
        torch.testing.assert_close(sharded, whole["model"] | trained)
        print("complete")


def kill(folder):
    """End while a file of an existing name is written."""
    pt_files._add_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    make_trainer(save_folder=str(folder), save_overwrite=True, algorithms=EMA(half_life="2ba"), run_name="run").fit()


if __name__ == "__main__":
    {"processes": processes, "kill": kill}[sys.argv[1]](Path(sys.argv[2]))

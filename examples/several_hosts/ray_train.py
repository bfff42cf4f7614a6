"""Train on handwritten digits in two workers of Ray Train.

python ray_train.py --save-folder=/shared/runs/digits
"""

from __future__ import annotations

import sys
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train_worker(config: dict[str, list[str]]) -> None:
    """Train in a worker of Ray, which has connected the processes already."""
    sys.path.insert(0, config["path"])
    from train import parse_arguments, train  # noqa: PLC0415  (the workers are other processes)

    train(parse_arguments(config["arguments"]))


def main(arguments: list[str], num_workers: int = 2, *, use_gpu: bool = False) -> None:
    """Train in workers of Ray, which are started again after a failure."""
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"arguments": arguments, "path": str(Path(__file__).parent)},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=use_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main(sys.argv[1:])

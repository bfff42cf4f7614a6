"""One of two processes that step optimizers of others on sharded weights; prints the distances to one process."""

import importlib
import json

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer.functional.dtensors import shard_like

SETTINGS = {
    "schedulefree.AdamWScheduleFree": {"lr": 0.02},
    "schedulefree.SGDScheduleFree": {"lr": 0.1},
    "pytorch_optimizer.AdEMAMix": {"lr": 0.01},
    "pytorch_optimizer.Kron": {"lr": 0.01},
    "pytorch_optimizer.Lion": {"lr": 0.01},
    "pytorch_optimizer.MARS": {"lr": 0.01},
    "pytorch_optimizer.Prodigy": {"d0": 1e-3},
    "pytorch_optimizer.SOAP": {"lr": 0.01},
    "pytorch_optimizer.ScheduleFreeAdamW": {"lr": 0.02},
    "torchao.optim.AdamW8bit": {"lr": 0.01, "eps": 1e-4},
    "torchao.optim.AdamW4bit": {"lr": 0.01, "eps": 1e-4},
    "torchao.optim.AdamWFp8": {"lr": 0.01, "eps": 1e-4},
}


def train(path, mesh=None):
    """Step three times from complete gradients, and return the complete weights as one vector."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    library, name = path.rsplit(".", 1)
    optimizer = getattr(importlib.import_module(library), name)(model.parameters(), **SETTINGS[path])
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = shard_like(gradient, parameter)
        optimizer.step()
    weights = [getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters()]
    return torch.cat([one.detach().flatten() for one in weights])


def distance(path, mesh):
    """Return the largest difference of a weight from one process, or the error."""
    try:
        return float((train(path, mesh) - train(path)).abs().max())
    except Exception as error:  # noqa: BLE001  (whatever it is, it is printed)
        return f"{type(error).__name__}: {error}"


def main():
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    with torch.compiler.set_stance("force_eager"):
        found = {path: distance(path, mesh) for path in SETTINGS}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

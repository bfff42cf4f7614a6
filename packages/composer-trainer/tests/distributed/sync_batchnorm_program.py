"""Train with SyncBatchNorm in two processes, and with BatchNorm in one; each writes ``<folder>/<rank>.json``.

torchrun --nproc-per-node=2 sync_batchnorm_program.py FOLDER KIND

Both processes may share one GPU, with gloo as the backend.
"""

import copy
import json
import sys
from pathlib import Path

import torch
from torch import nn

from composer import distributed
from composer.core import DataSpec, State

SAMPLES, STEPS, MICROBATCH = 7, 3, 2  # process 0 has microbatches of 2 and 2 samples, process 1 of 2 and 1


def make_model(device):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4, 2)]
    return nn.Sequential(*layers).double().to(device)


def train(model, parallel, batches):
    """Take steps of SGD with momentum in all processes, and return the weights and running statistics."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = State(model, optimizers=optimizer, device=batches[0].device)
    parallel.prepare(state)
    for batch in batches:
        parts = DataSpec([]).split_batch(batch, MICROBATCH)
        weighted = [(part, len(part) / len(batch)) for part in parts]
        batch_weights = parallel.exchange_counts(distributed.BatchShare(len(batch), microbatches=len(parts)))
        optimizer.zero_grad()
        rank_weight = batch_weights.weight()
        padded = parallel.padded([(part, weight * rank_weight) for part, weight in weighted], batch_weights)
        for place, (part, weight) in enumerate(padded):
            parallel.begin_microbatch(is_last=place == len(padded) - 1)
            (parallel.forward(part).square().mean() * weight).backward()
        optimizer.step()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    complete = [getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for tensor in tensors.values()]
    return [number for tensor in complete for number in tensor.double().flatten().tolist()]


def main(folder, kind):
    shares = torch.cuda.device_count() < 2
    if shares:
        torch.distributed.init_process_group("cpu:gloo,cuda:gloo")
    else:
        distributed.initialize_dist("gpu")
    rank = distributed.get_global_rank()
    device = torch.device("cuda", 0 if shares else rank)
    torch.cuda.set_device(device)
    draw = torch.Generator().manual_seed(1)
    batches = torch.randn(STEPS, SAMPLES, 3, 4, 4, generator=draw, dtype=torch.float64).to(device)
    model = make_model(device)
    alone = copy.deepcopy(model)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    config = {"fsdp": {}} if kind == "fsdp" else {}
    own = [batch[rank::2] for batch in batches]
    found = train(model, distributed.Parallelism(config), own)
    layers = [type(layer).__name__ for layer in model if "BatchNorm" in type(layer).__name__]
    result = {"found": found, "expected": train_alone(alone, batches), "layers": layers}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def train_alone(model, batches):
    """Take the same steps in this process, with microbatches of the samples of both."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        for start in range(0, len(batch), 2 * MICROBATCH):
            part = batch[start : start + 2 * MICROBATCH]
            (model(part).square().mean() * len(part) / len(batch)).backward()
        optimizer.step()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [number for tensor in tensors.values() for number in tensor.double().flatten().tolist()]


if __name__ == "__main__":
    main(*sys.argv[1:])

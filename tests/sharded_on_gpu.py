"""Train a model sharded by FSDP2 on one GPU, save and load it; prints what came out as JSON.

python sharded_on_gpu.py FOLDER
"""

import json
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer
from composer.callbacks import CheckpointSaver
from composer.checkpoint import load_checkpoint, save_checkpoint
from composer.functional.dtensors import reshard
from composer.models import ComposerClassifier

WIDTH, BATCHES, OVERFLOWS_AT = 4096, 12, 5
MIB = 2**20


def draw_data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCHES * 16, WIDTH, generator=generator)
    return TensorDataset(inputs, inputs[:, :10].argmax(dim=1))


class Overflow(Callback):
    """Makes the gradients of a batch infinite, and records weights and scale around it."""

    def __init__(self):
        self.scales, self.weights = [], []

    def batch_start(self, state, logger):
        self.scales.append(state.scaler.get_scale())
        self.weights.append(first_weights(state.model))

    def before_backward(self, state, logger):
        if int(state.timestamp.batch) == OVERFLOWS_AT:
            state.loss = state.loss * torch.inf


def first_weights(model):
    return next(model.parameters()).full_tensor()[0, :8].tolist()


def make_trainer(precision, **options):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    model = ComposerClassifier(network, num_classes=10, train_metrics=[])
    return Trainer(
        model=model,
        train_dataloader=DataLoader(draw_data(), batch_size=16, shuffle=True),
        optimizers=torch.optim.AdamW(model.parameters(), lr=3e-5),
        parallelism_config={"fsdp": {}},
        max_duration=f"{BATCHES}ba",
        precision=precision,
        device="gpu",
        seed=17,
        progress_bar=False,
        **options,
    )


def loss_after(precision, **options):
    """Return the loss after a training, and the trainer."""
    trainer = make_trainer(precision, **options)
    trainer.fit()
    inputs, labels = next(iter(DataLoader(draw_data(), batch_size=64)))
    with torch.no_grad():
        loss = cross_entropy(trainer.state.model((inputs.cuda(), labels.cuda())).float(), labels.cuda()).item()
    reshard(trainer.state.model)
    return loss, trainer


def peak(call):
    """Return the MiB of the device's memory that a call needs above what is in use."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def main(folder):
    overflow = Overflow()
    found = {"losses": [loss_after("fp32")[0], loss_after("amp_fp16")[0]]}
    _, trainer = loss_after("amp_fp16", callbacks=overflow)
    found["scales"], found["weights"] = overflow.scales, overflow.weights
    state = trainer.state
    tensors = [*state.model.parameters()]
    tensors += [one for held in state.optimizers[0].state.values() for one in held.values()]
    found["shard"] = sum(one.nbytes for one in tensors) / MIB
    before = [one.full_tensor().clone() for one in state.model.parameters()]
    found["save"] = peak(lambda: save_checkpoint(state, f"{folder}/saved"))
    with torch.no_grad():
        for one in state.model.parameters():
            one.zero_()
    found["load"] = peak(lambda: load_checkpoint(f"{folder}/saved", state))
    after = [one.full_tensor() for one in state.model.parameters()]
    found["equal"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    saver = CheckpointSaver(f"{folder}/background", "{batch}", save_interval="1ba")
    saver.fit_start(state, None)
    found["background"] = peak(lambda: saver.save(state))
    with torch.no_grad():
        for one in state.model.parameters():
            one.zero_()  # while it is written
    saver.fit_end(state, None)
    load_checkpoint(f"{folder}/background/{int(state.timestamp.batch)}", state)
    after = [one.full_tensor() for one in state.model.parameters()]
    found["equal in the background"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    print(json.dumps(found), flush=True)
    trainer.close()


if __name__ == "__main__":
    main(sys.argv[1])

"""One of several processes of which one runs out of memory while the size of microbatches is searched; prints JSON."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer, distributed
from composer.algorithms import GradientClipping, SkipSpikes
from composer.models import ComposerClassifier

FAILING = 1
"""The rank of the process with less memory."""


class Allocate(torch.autograd.Function):
    """Runs out of memory in the backward pass."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("CUDA out of memory.")


class Block(nn.Module):
    """Dropout, a running mean and a layer, which runs out of memory for more than ``capacity`` samples.

    With an optimizer, it does so once that has a state.
    """

    def __init__(self):
        super().__init__()
        self.layer, self.dropout, self.fails, self.capacity = nn.Linear(6, 6), nn.Dropout(0.2), "", 0
        self.register_buffer("mean", torch.zeros(6))
        self.tried, self.optimizer = [], None

    def forward(self, inputs):
        self.tried.append(len(inputs))
        self.mean += inputs.detach().mean(0)
        hidden = self.layer(inputs)
        is_full = self.optimizer is None or self.optimizer.state
        if distributed.get_global_rank() == FAILING and len(inputs) > self.capacity and is_full:
            if self.fails == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            if self.fails == "backward":
                hidden = Allocate.apply(hidden)
        return self.dropout(hidden).relu()


def train(size, config, block=0, fails="", capacity=2, needs_state=False, **options):
    """Return the weights, running means and losses of five batches, the size, and the sizes that a block has seen."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(4, 6), Block(), Block(), Block(), nn.Linear(6, 3)).double()
    network[1 + block].fails, network[1 + block].capacity = fails, capacity
    model = ComposerClassifier(network, num_classes=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    network[1 + block].optimizer = optimizer if needs_state else None
    inputs = torch.randn(40 * distributed.get_world_size(), 4, generator=torch.Generator().manual_seed(1)).double()
    data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=8, sampler=distributed.get_sampler(data)),
        optimizers=optimizer,
        algorithms=[GradientClipping("norm", 0.2), SkipSpikes(window=4)],
        max_duration="5ba",
        device_train_microbatch_size=size,
        parallelism_config=config,
        device="cpu",
        seed=17,
        progress_bar=False,
        **options,
    )
    if size == 8:  # from the second batch on, half
        trainer.engine.on("batch_end", lambda state, _: setattr(state, "device_train_microbatch_size", 4))
    trainer.fit()
    state = trainer.state
    values = [getattr(one, "full_tensor", lambda one=one: one)() for one in (*model.parameters(), *model.buffers())]
    measured = [float(state.total_loss), *map(float, state.train_metric_values.values())]
    trainer.close()
    return [one.tolist() for one in values] + measured, state.device_train_microbatch_size, network[1].tried


def main():
    if distributed.get_world_size() == 2:
        fully = {"fsdp": {"reshard_after_forward": False}}
        configs = {"fsdp": {"fsdp": {}}, "not resharded": fully, "ddp": None}
        failures = [(0, "forward"), (2, "forward"), (0, "backward"), (2, "backward")]
    else:
        configs = {"mesh": {"mesh": {"replicate": 2, "shard": 2}}, "fsdp": {"fsdp": {}}}
        failures = [(2, "forward"), (0, "backward")]
    found = {}
    for name, config in configs.items():
        expected, *_ = train(2, config)
        for block, fails in failures:
            result, size, tried = train("auto", config, block, fails)
            found[f"{name}, {fails} of block {block}"] = [size, result == expected, tried[:3]]
        if distributed.get_world_size() > 2:
            continue  # the second batch is searched with two processes only
        expected, *_ = train(8, config)
        result, size, tried = train("auto", config, fails="forward", capacity=4, needs_state=True)
        found[f"{name}, in the second batch"] = [size, result == expected, tried[:6]]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

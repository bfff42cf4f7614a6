"""Gradients and steps of a contrastive loss, in one process or in several; the arguments are a folder."""

import json
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from composer import DataSpec, Trainer
from composer.distributed import get_global_rank, get_sampler, get_world_size, initialize_dist
from composer.models import ComposerContrastive, ComposerModel

VIEWS = torch.randn(14, 2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.arange(14) % 3


def make_model(**settings):
    """A model with the same weights in each process."""
    torch.manual_seed(0)
    return ComposerContrastive(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double(), **settings)


def gradients(**settings):
    """The gradients of one batch of which the processes have unequal shares, with DDP and the weights of a trainer."""
    rank, world_size = get_global_rank(), get_world_size()
    model = make_model(**settings)
    share = slice(None) if world_size == 1 else slice(5 * rank, 5 + 9 * rank)  # 5 and 9 samples
    batch = VIEWS[share], LABELS[share]
    wrapped = model if world_size == 1 else DistributedDataParallel(model)
    loss = model.loss(wrapped(batch), batch) * len(batch[0]) * world_size / 14
    loss.backward()
    total = loss.detach() / world_size
    if world_size > 1:
        distributed.all_reduce(total)
    return [total.item(), *torch.cat([one.grad.flatten() for one in model.parameters()]).tolist()]


def trained(microbatch_size=None):
    """The weights after two epochs of batches of 8 and 6 samples, and the last loss."""
    data, model = TensorDataset(VIEWS, LABELS), make_model()
    loader = DataLoader(data, 8 // get_world_size(), sampler=get_sampler(data))
    with Trainer(
        model=model,
        train_dataloader=DataSpec(loader, split_batch=model.split_batch),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
        max_duration="2ep",
        device_train_microbatch_size=microbatch_size,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    return torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()


class InParts(ComposerModel):
    """A model whose loss has parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3).double()

    def forward(self, batch):
        return self.layer(batch[0][:, 0])

    def loss(self, outputs, batch):
        return {"class": nn.functional.cross_entropy(outputs, batch[1]), "size": outputs.square().mean()}


def evaluated():
    """The loss and its parts on 13 samples in batches of 4 in all processes."""
    data = TensorDataset(VIEWS[:13], LABELS[:13])
    loader = DataLoader(data, 4 // get_world_size(), sampler=get_sampler(data))
    with Trainer(model=InParts(), eval_dataloader=loader, device="cpu", progress_bar=False) as trainer:
        values = trainer.eval()["eval"]
    return [values[name].item() for name in ("loss", "loss/class", "loss/size")]


if __name__ == "__main__":
    initialize_dist("cpu")
    results = {
        "views": gradients(),
        "classes": gradients(supervised=True),
        "in parts": gradients(microbatch_size=2),
        "evaluated": evaluated(),
        "trained": trained(),
        "trained in parts": trained(2),
    }
    Path(sys.argv[1], f"{get_global_rank()}.json").write_text(json.dumps(results))

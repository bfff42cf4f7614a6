"""Evaluates metrics with lists on fewer samples than processes, and prints the values or the error."""

import json
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, Metric
from torchmetrics.classification import MulticlassAUROC, MulticlassAveragePrecision

from composer.distributed import get_sampler
from composer.models import ComposerClassifier
from composer.trainer import Trainer


class FirstLogit(CatMetric):
    """Keeps a number of each sample, in tensors without a dimension."""

    def update(self, outputs, target):
        for each in outputs[:, 0]:
            super().update(each)


class Listed(Metric):
    """Keeps the scores of each sample in a list that processes do not concatenate."""

    def __init__(self):
        super().__init__()
        self.add_state("scores", default=[], dist_reduce_fx=None)

    def update(self, outputs, target):
        self.scores += list(outputs)

    def compute(self):
        return torch.stack(self.scores).sum()


def evaluate(samples, **metrics):
    """Return the values of metrics over a number of samples."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(samples, 3, generator=generator), torch.arange(samples) % 3)
    loader = DataLoader(data, batch_size=2, sampler=get_sampler(data))
    model = ComposerClassifier(nn.Identity(), 3, train_metrics=[], val_metrics=metrics)
    trainer = Trainer(model=model, eval_dataloader=loader, device="cpu", progress_bar=False)
    return {
        name: [round(each, 5) for each in value.reshape(-1).sort().values.tolist()]
        for name, value in trainer.eval()["eval"].items()
    }


def results():
    """Yield the results of each evaluation."""
    for samples in (1, 3, 8):
        curves = MulticlassAUROC(3, average=None), MulticlassAveragePrecision(3, average=None)
        yield evaluate(samples, auroc=curves[0], precision=curves[1], logits=FirstLogit())
    yield evaluate(4, listed=Listed())
    try:
        yield evaluate(3, listed=Listed())
    except ValueError as error:
        yield str(error)


warnings.filterwarnings("ignore", module="torchmetrics")  # of classes without a sample
print(json.dumps(list(results())))

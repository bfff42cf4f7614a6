"""Matrices of an evaluation become pictures under their names."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassConfusionMatrix, MultilabelConfusionMatrix

from composer import Logger, State, Trainer
from composer.callbacks import MatrixVisualizer
from composer.loggers import InMemoryLogger
from composer.loggers.images import draw_matrix
from composer.models import ComposerClassifier


def evaluated(metric, *components, labels=3):
    """Evaluate a classifier on images of three classes."""
    data = TensorDataset(torch.rand(12, 4), torch.arange(12) % labels)
    torch.manual_seed(0)
    model = ComposerClassifier(nn.Linear(4, labels), val_metrics=[metric], train_metrics=[], num_classes=labels)
    loggers = [one for one in components if not isinstance(one, MatrixVisualizer)]
    callbacks = [one for one in components if isinstance(one, MatrixVisualizer)]
    with Trainer(model=model, eval_dataloader=DataLoader(data, 6), loggers=loggers, callbacks=callbacks,
                 run_name="run", device="cpu", progress_bar=False) as trainer:  # fmt: skip
        return trainer.eval()["eval"]


class TestMatrices:
    def test_each_evaluation(self):
        """The picture is that of the metric's value."""
        memory = InMemoryLogger()

        values = evaluated(MulticlassConfusionMatrix(3), memory, MatrixVisualizer())

        ((_, pictures),) = memory.images["Images/eval/MulticlassConfusionMatrix"]
        assert torch.equal(pictures[0], draw_matrix(values["MulticlassConfusionMatrix"]))

    def test_several(self):
        """Matrices of several labels are several pictures."""
        memory, callback = InMemoryLogger(), MatrixVisualizer()
        state = State(model=None)
        state.dataloader_label = "eval"
        metric = MultilabelConfusionMatrix(4)
        metric.update(torch.rand(5, 4), torch.randint(2, (5, 4)))
        state.eval_metric_values.record("eval", {"Matrix": metric.compute(), "Vector": torch.rand(3)})

        callback.eval_end(state, Logger(state, destinations=memory))

        assert [len(pictures) for _, pictures in memory.images["Images/eval/Matrix"]] == [4]
        assert list(memory.images) == ["Images/eval/Matrix"]

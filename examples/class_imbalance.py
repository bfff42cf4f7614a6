"""Find a rare class: class weights, a sampler and the focal loss, with metrics that are right for imbalance.

    python -m pip install scikit-learn
    python examples/class_imbalance.py

The data are scikit-learn's digits: 2 % of the images for training show an eight, all others another digit. Of the
images for evaluation 10 % do, and who never finds one is right in 90 % of the cases: accuracy hides what is missed. The
balanced accuracy is the mean of the accuracies of both classes; the average precision, the area under the curve of
precision and recall, needs no threshold. The baseline is a logistic regression with class weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, average_precision_score, balanced_accuracy_score
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler
from torchmetrics.classification import BinaryAccuracy, BinaryAveragePrecision, MulticlassAccuracy
from torchvision.ops import sigmoid_focal_loss

from composer import Trainer
from composer.models import ComposerClassifier


def load_data(fraction: float = 0.02) -> tuple[TensorDataset, TensorDataset]:
    """Return images ``(1, 8, 8)`` with the label 1 for an eight: to train on, with few of them, and to evaluate on."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(digits == 8).long()
    train, test = train_test_split(torch.arange(len(labels)), test_size=0.5, random_state=0, stratify=digits)
    common, rare = train[labels[train] == 0], train[labels[train] == 1]
    train = torch.cat([common, rare[: round(fraction * len(common))]])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_network() -> nn.Module:
    """Return a small convolutional network with one score per image, ``(N,)``: the logit of class 1."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 16, 1),
        nn.Flatten(0),
    )


def train(
    train_data: TensorDataset,
    test_data: TensorDataset,
    loss_fn: Callable[..., Tensor],
    sampler: Sampler[int] | None = None,
    duration: str = "20ep",
) -> dict[str, float]:
    """Train with a loss and a sampler, and return the metrics of the evaluation."""
    torch.manual_seed(0)
    metrics = {
        "accuracy": BinaryAccuracy(),
        "balanced accuracy": MulticlassAccuracy(2, average="macro"),
        "average precision": BinaryAveragePrecision(),
    }
    model = ComposerClassifier(make_network(), train_metrics=[], val_metrics=metrics, loss_fn=loss_fn)
    with Trainer(
        model=model,
        train_dataloader=DataLoader(train_data, batch_size=64, sampler=sampler, shuffle=sampler is None),
        eval_dataloader=DataLoader(test_data, batch_size=len(test_data)),
        eval_interval=duration,
        optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3),
        max_duration=duration,
        seed=0,
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    return {name: float(value) for name, value in trainer.state.eval_metric_values["eval"].items()}


def focal(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the focal loss of torchvision (arXiv:1708.02002), which takes floats."""
    return sigmoid_focal_loss(scores, labels.float(), alpha=0.75, gamma=2.0, reduction="mean")


def compare(duration: str = "20ep") -> dict[str, dict[str, float]]:
    """Return the metrics of the baseline and of each training."""
    train_data, test_data = load_data()
    labels = train_data.tensors[1]
    counts = labels.bincount(minlength=2)
    sampler = WeightedRandomSampler((1 / counts)[labels].tolist(), num_samples=len(labels))
    plain, weighted = nn.BCEWithLogitsLoss(), nn.BCEWithLogitsLoss(pos_weight=counts[0] / counts[1])
    trainings = {
        "plain": (plain, None),
        "class weights": (weighted, None),
        "sampler": (plain, sampler),
        "focal loss": (focal, None),
    }

    linear = LogisticRegression(class_weight="balanced", max_iter=1000).fit(train_data.tensors[0].flatten(1), labels)
    scores, truth = linear.decision_function(test_data.tensors[0].flatten(1)), test_data.tensors[1]
    baseline = {
        "accuracy": accuracy_score(truth, scores > 0),
        "balanced accuracy": balanced_accuracy_score(truth, scores > 0),
        "average precision": average_precision_score(truth, scores),
    }
    results = {name: train(train_data, test_data, *how, duration=duration) for name, how in trainings.items()}
    return {"logistic regression": baseline, **results}


def main() -> None:
    """Train with each remedy and print the metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", default="20ep", help="of each training (default: %(default)s)")
    for name, metrics in compare(parser.parse_args().duration).items():
        print(f"{name:20}", *(f"  {metric} {value:.3f}" for metric, value in sorted(metrics.items())))


if __name__ == "__main__":
    main()

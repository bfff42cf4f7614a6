"""Assign several labels to each image, and tune the thresholds on validation data.

    python -m pip install scikit-learn
    python examples/multi_label.py

An image is a strip of three cells, each empty or with one of scikit-learn's digits; its labels are the digits that
occur. Each label has a score and a binary cross entropy of its own. The baseline is a logistic regression per label.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MultilabelAveragePrecision, MultilabelF1Score
from torchmetrics.functional.classification import multilabel_f1_score

from composer import Trainer
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler

NUM_LABELS = 10


def make_strips(images: Tensor, digits: Tensor, count: int, generator: torch.Generator) -> TensorDataset:
    """Return strips ``(1, 8, 24)`` of images ``(8, 8)``, and their labels ``(10,)``: 1 for a digit that occurs."""
    chosen = torch.randint(len(digits), (count, 3), generator=generator)
    filled = torch.rand(count, 3, generator=generator) < 0.6
    cells = images[chosen] * filled[..., None, None]
    labels = (nn.functional.one_hot(digits[chosen], NUM_LABELS) * filled[..., None]).amax(dim=1)
    return TensorDataset(torch.cat(cells.unbind(dim=1), dim=2).unsqueeze(1), labels)


def load_data() -> list[TensorDataset]:
    """Return strips to train on, to tune the thresholds with and to test, which have no digit's image in common."""
    pixels, digits = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(digits)
    generator = torch.Generator().manual_seed(0)
    parts = torch.randperm(len(digits), generator=generator).tensor_split((1000, 1300))
    sizes = (400, 500, 1000)
    return [make_strips(images[part], digits[part], size, generator) for part, size in zip(parts, sizes, strict=True)]


def make_network(width: int = 32) -> nn.Module:
    """Return a convolutional network with a score for each label, which is that of the best place in the image."""
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, kernel_size=3, stride=2, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Conv2d(2 * width, NUM_LABELS, kernel_size=4),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
    )


def best_thresholds(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return for each label the threshold with the highest F1 score, ``(10,)``, from those between 0.05 and 0.95."""
    candidates = torch.linspace(0.05, 0.95, 19)
    found = probabilities > candidates[:, None, None]  # (candidates, N, labels)
    hits = (found & (labels == 1)).sum(dim=1)
    scores = 2 * hits / (found.sum(dim=1) + labels.sum(dim=0)).clamp(min=1)
    return candidates[scores.argmax(dim=0)]


def f1(probabilities: Tensor, thresholds: Tensor | float, labels: Tensor) -> float:
    """Return the mean of the labels' F1 scores."""
    return multilabel_f1_score((probabilities > thresholds).long(), labels, NUM_LABELS).item()


def run(duration: str = "20ep") -> dict[str, float]:
    """Train, tune the thresholds on the validation strips, and return the F1 scores for the test strips."""
    train, validation, test = load_data()
    torch.manual_seed(0)
    model = ComposerClassifier(
        make_network(),
        NUM_LABELS,
        train_metrics=[],
        val_metrics=[MultilabelF1Score(NUM_LABELS), MultilabelAveragePrecision(NUM_LABELS)],
        loss_fn=nn.BCEWithLogitsLoss(),
    )
    with Trainer(
        model=model,
        train_dataloader=DataLoader(train, batch_size=64, shuffle=True),
        eval_dataloader=DataLoader(validation, batch_size=500),
        optimizers=torch.optim.AdamW(model.parameters(), lr=5e-3),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur"),
        max_duration=duration,
        seed=0,
        progress_bar=False,
    ) as trainer:
        print(trainer.fit())
        predictions = [
            trainer.predict(DataLoader(part, batch_size=500), join=True, with_targets=True)
            for part in (validation, test)
        ]
    (tuning, tuning_labels), (probabilities, labels) = [(scores.sigmoid(), labels) for scores, labels in predictions]
    linear = OneVsRestClassifier(LogisticRegression(max_iter=1000)).fit(train.tensors[0].flatten(1), train.tensors[1])
    return {
        "logistic regression": f1(torch.tensor(linear.predict_proba(test.tensors[0].flatten(1))), 0.5, labels),
        "network": f1(probabilities, 0.5, labels),
        "network, tuned thresholds": f1(probabilities, best_thresholds(tuning, tuning_labels), labels),
    }


def main() -> None:
    """Train and print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", default="20ep", help="of the training (default: %(default)s)")
    for name, score in run(parser.parse_args().duration).items():
        print(f"F1 score of the test strips, {name}: {score:.3f}")


if __name__ == "__main__":
    main()

"""Count the Python and C calls that a training step makes above a plain loop, for a table in ``pyproject.toml``.

    python tests/count_step.py                               # one process
    torchrun --nproc-per-node 2 tests/count_step.py          # two processes, over gloo

An MLP trains on batches of 8 from a ``DataLoader`` with a ``collate_fn``. The calls of 100 steps after 100 are counted,
and those of a plain loop over the same loader are subtracted, which calls the kernel of an algorithm. The
numbers are exact for a release of torch, as both call it, and equal on every machine; a loop in torch's loader may be
longer than ours, so that they may be negative. ``tests/test_calls.py`` compares them with the limits.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from composer import Callback, Trainer, functional
from composer import algorithms as al
from composer.distributed import get_sampler
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier

WARM, COUNTED, SIZE = 100, 100, 8
ALGORITHMS = {
    "CutOut": al.CutOut,
    "MixUp": al.MixUp,
    "LabelSmoothing": al.LabelSmoothing,
    "GradientClipping": lambda: al.GradientClipping("norm", 1.0),
    "EMA": lambda: al.EMA("100ba"),
    "ChannelsLast": al.ChannelsLast,
}


class Samples(Dataset):
    """Images of 4 by 8 with a class."""

    def __init__(self) -> None:
        self.some = [(torch.randn(1, 4, 8), number % 10) for number in range(256)]

    def __len__(self) -> int:
        return SIZE * (WARM + COUNTED + 10) * int(os.environ.get("WORLD_SIZE", "1"))

    def __getitem__(self, index: int) -> Any:
        return self.some[index % 256]


class Collate:
    """A ``collate_fn`` that counts the calls between two of its own, ``COUNTED`` batches apart."""

    def __init__(self) -> None:
        self.batches, self.calls = 0, {"call": 0, "c_call": 0}

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch."""
        self.batches += 1
        if self.batches == WARM:
            sys.setprofile(self._note)
        elif self.batches == WARM + COUNTED:
            sys.setprofile(None)
        return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])

    def _note(self, frame: object, event: str, argument: object) -> None:
        if event in self.calls:
            self.calls[event] += 1

    def in_a_step(self) -> tuple[float, float]:
        """Return the Python and C calls in a step."""
        return self.calls["call"] / COUNTED, self.calls["c_call"] / COUNTED


class Nothing(Callback):
    """Does nothing at two events."""

    def batch_start(self, state: Any, logger: Any) -> None:
        """Do nothing."""

    def batch_end(self, state: Any, logger: Any) -> None:
        """Do nothing."""


class Looks(Nothing):
    """Reads one property in a step."""

    def batch_end(self, state: Any, logger: Any) -> None:
        """Read it."""
        assert state.seed is not None


def make_network() -> torch.nn.Module:
    """Return the MLP."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    return torch.nn.Sequential(torch.nn.Flatten(), *layers)


def with_trainer(*, has_metric: bool = False, **options: Any) -> tuple[float, float]:
    """Return the calls in a step of the Trainer."""
    model = ComposerClassifier(make_network(), num_classes=10, **{} if has_metric else {"train_metrics": []})
    collate, data, is_alone = Collate(), Samples(), "WORLD_SIZE" not in os.environ
    order = {"shuffle": True} if is_alone else {"sampler": get_sampler(data, shuffle=True)}
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=SIZE, collate_fn=collate, **order),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        max_duration=f"{WARM + COUNTED + 1}ba",
        progress_bar=False,
        device="cpu",
        **options,
    )
    trainer.fit()
    return collate.in_a_step()


def plain_loop(name: str = "") -> tuple[float, float]:
    """Return the calls in a step of a plain loop, which calls the kernel of an algorithm."""
    network, generator = make_network(), torch.Generator()
    average, model, collate, data = copy.deepcopy(network), network, Collate(), Samples()
    order: dict[str, Any] = {"shuffle": True}
    if "WORLD_SIZE" in os.environ:
        model, order = torch.nn.parallel.DistributedDataParallel(network), {"sampler": get_sampler(data, shuffle=True)}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for batch in DataLoader(data, batch_size=SIZE, collate_fn=collate, **order):
        images, targets = batch
        if name == "CutOut":
            images = functional.cutout_batch(images, 1, 0.5, generator=generator)
        if name == "MixUp":
            images, targets = functional.mixup(images, targets, alpha=0.2, num_classes=10, generator=generator)
        optimizer.zero_grad()
        outputs = model(images)
        if name == "LabelSmoothing":
            targets = functional.smooth_labels(outputs, targets, 0.1)
        cross_entropy(outputs, targets).backward()
        if name == "GradientClipping":
            functional.apply_gradient_clipping(network, "norm", 1.0)
        optimizer.step()
        if name == "EMA":
            functional.compute_ema(network, average, 0.99)
    return collate.in_a_step()


def above(ours: tuple[float, float], loop: tuple[float, float]) -> tuple[float, float]:
    """Return the Python and C calls above those of a loop."""
    return round(ours[0] - loop[0], 2), round(ours[1] - loop[1], 2)


def count() -> dict[str, tuple[float, float]]:
    """Return the calls of each case, and of a planted property."""
    if "WORLD_SIZE" in os.environ:
        return {"two-processes": above(with_trainer(), plain_loop())}
    loop = plain_loop()
    found = {
        "bare": above(with_trainer(), loop),
        "five-callbacks": above(with_trainer(callbacks=[Nothing() for _ in range(5)]), loop),
        "logged": above(with_trainer(loggers=InMemoryLogger()), loop),
        "metric": above(with_trainer(has_metric=True), loop),
    }
    found |= {name: above(with_trainer(algorithms=make()), plain_loop(name)) for name, make in ALGORITHMS.items()}
    one, planted = with_trainer(callbacks=Nothing()), with_trainer(callbacks=Looks())
    return found | {"planted": above(planted, one)}


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        numbers = count()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(numbers))

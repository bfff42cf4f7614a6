"""Count the calls of our own functions in a step, a save and a load, and the files that these enter.

    python tests/count_calls.py

The model has two layers, there is one process, and a load is what the construction of a Trainer with ``load_path`` adds
to that of one without. ``tests/test_calls.py`` compares the numbers with the limits in ``pyproject.toml``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.core import Callback, Logger, State
from composer.models import ComposerClassifier

WARM, COUNTED = 20, 50
"""The batches before those that are counted, and these."""


def make_trainer(**options: object) -> Trainer:
    """Return a Trainer of a network of two layers."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = ComposerClassifier(network, num_classes=10, train_metrics=[])
    data = TensorDataset(torch.rand(1024, 32), torch.randint(10, (1024,)))
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=8),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        progress_bar=False,
        device="cpu",
        seed=1,
        **{"max_duration": f"{WARM + COUNTED}ba", **options},
    )


def calls_of(function: Callable[[], object]) -> Counter[str]:
    """Return how often a call enters functions of each file of composer, in any thread."""
    found: Counter[str] = Counter()

    def note(frame, event, _):
        # A type hint that is evaluated is no function of its module.
        if event == "call" and frame.f_code.co_name != "<module>":
            name = frame.f_globals.get("__name__", "")
            if name.startswith("composer."):
                found[name] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def calls_in_a_step(**options: object) -> float:
    """Return the calls in a batch, in the mean of many, of a Trainer with more options."""
    runs = [make_trainer(max_duration=f"{batches}ba", **options) for batches in (WARM, WARM + COUNTED)]
    few, many = (sum(calls_of(run.fit).values()) for run in runs)
    return (many - few) / COUNTED


def count() -> dict[str, float]:
    """Return all numbers by name."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = f"{folder}/saved"
        trainer = make_trainer(max_duration="2ba")
        trainer.fit()
        trainer.save_checkpoint(f"{folder}/first")  # what is imported and compiled once
        saved = calls_of(lambda: trainer.save_checkpoint(path))
        construct = calls_of(make_trainer)
        make_trainer(load_path=path)
        loaded = calls_of(lambda: make_trainer(load_path=path))
    return {
        "step-calls": calls_in_a_step(),
        "save-calls": sum(saved.values()),
        "load-calls": sum(loaded.values()) - sum(construct.values()),
        "save-files": len(saved),
        "load-files": len(loaded - construct),
    }


class Looks(Callback):
    """Calls one of our functions at each batch."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Call it."""
        state.component_key(self)


if __name__ == "__main__":
    numbers = count()
    if "--json" in sys.argv:
        numbers["step-calls with a callback"] = calls_in_a_step(callbacks=Looks())
        print(json.dumps(numbers))
    else:
        print("\n".join(f"{name}: {number:g}" for name, number in numbers.items()))

"""Print how many modules and functions of composer one save, one load and one resumed start enter.

    python tests/count_modules.py

The goals are 20 modules for ``trainer.save_checkpoint``, and 30 for a Trainer with ``load_path`` and its ``fit`` until
the first batch. They are printed beside the numbers, and not asserted, as they are not met yet.
"""

import contextlib
import sys
import tempfile
import threading
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms import EMA, BlurPool
from composer.checkpoint import load_checkpoint, save_checkpoint
from composer.core import Callback
from composer.models import ComposerClassifier

GOALS = {"trainer.save_checkpoint": 20, "Trainer(load_path=...) and fit until the first batch": 30}


class Stop(Exception):
    """Ends the training before its first batch."""


class StopAtBatch(Callback):
    """Raises :class:`Stop` when the first batch begins."""

    def batch_start(self, state, logger):
        """End the training."""
        raise Stop


def resume(path: str) -> None:
    """Construct a Trainer that resumes from a checkpoint, and train until its first batch."""
    trainer = make_trainer(load_path=path, callbacks=StopAtBatch(), max_duration="2ep")
    with contextlib.suppress(Stop):
        trainer.fit()


def entered(call: Callable[[], object]) -> set[tuple[str, str]]:
    """Return module and qualified name of every function of composer that a call enters, in any thread."""
    result = set()

    def note(frame, event, _):
        name = frame.f_globals.get("__name__", "")
        # A type hint that is evaluated is no function of its module.
        if event == "call" and name.startswith("composer.") and frame.f_code.co_name != "<module>":
            result.add((name, frame.f_code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return result


def make_trainer(**options: object) -> Trainer:
    """Return a Trainer of a small network with two algorithms."""
    layers = [torch.nn.Conv2d(1, 4, 3, stride=2), torch.nn.Flatten(), torch.nn.Linear(36, 2)]
    model = ComposerClassifier(torch.nn.Sequential(*layers), num_classes=2)
    data = TensorDataset(torch.rand(8, 1, 8, 8), torch.randint(2, (8,)))
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4),
        optimizers=torch.optim.Adam(model.parameters()),
        algorithms=[BlurPool(min_channels=1), EMA("1ba")],
        progress_bar=False,
        device="cpu",
        **{"max_duration": "1ep", **options},
    )


def main() -> None:
    """Count for ``trainer.save_checkpoint``, both functions, and a Trainer with ``load_path``."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer()
        trainer.fit()
        path = f"{folder}/saved"
        fresh = make_trainer()
        calls = {
            "trainer.save_checkpoint": lambda: trainer.save_checkpoint(path),
            "save_checkpoint": lambda: save_checkpoint(trainer.state, f"{folder}/alone"),
            "load_checkpoint": lambda: load_checkpoint(path, fresh.state),
            "Trainer(load_path=...) and fit until the first batch": lambda: resume(path),
        }
        for name, call in calls.items():
            functions = entered(call)
            modules = sorted({module for module, _ in functions})
            goal = f" (goal: {GOALS[name]})" if name in GOALS else ""
            print(f"{name}: {len(modules)} modules{goal}, {len(functions)} functions\n  {', '.join(modules)}")


if __name__ == "__main__":
    main()

"""The law of an exact resume, as a check of a user's own loader, model and callbacks."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

from composer.core import State, Time
from composer.core.state import STOPPED_BY_SIGNAL

if TYPE_CHECKING:
    from composer.trainer import Trainer


def check_exact_resume(
    make_trainer: Callable[..., Trainer],
    stops: Iterable[str | Callable[[Trainer], object]] = ("1ba",),
    folder: str | Path | None = None,
) -> None:
    """Check that a run that is stopped and resumed is bit-identical to an uninterrupted one.

    The run is trained once without a stop. For each stop it is trained up to it, created again, and resumed from the
    checkpoint. The batches of both parts, the weights and the optimizers have to equal those of the first run. In
    several processes all have to call it with the same folder, and each compares its own batches.

    Args:
        make_trainer: Returns a new Trainer with all that belongs to it (model, optimizers, loader, callbacks). Its
            keyword arguments have to be passed on to ``Trainer``: ``run_name``, ``save_folder``, ``save_interval`` and
            ``autoresume``. Pass ``seed=`` to ``Trainer``, and initialize the model equally in each call.
        stops: Where to stop: a time such as ``"3ba"`` or ``"1ep"``, or a function that is called with the Trainer
            and arranges that its ``fit`` stops, for example with ``state.stop_training()`` at an event.
        folder: Where the checkpoints are written; a temporary folder if None.

    Raises:
        AssertionError: A batch, a weight or a value of an optimizer differs. The message names the first one.
        ValueError: A run ended without having stopped at the given place.

    Example:
        >>> from composer import Trainer
        >>> from composer.models import ComposerClassifier
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> data = TensorDataset(torch.rand(16, 4), torch.arange(16) % 2)
        >>> def make_trainer(**settings):
        ...     torch.manual_seed(0)
        ...     model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     loader = DataLoader(data, batch_size=4, shuffle=True)
        ...     return Trainer(model=model, optimizers=optimizer, train_dataloader=loader, max_duration="2ep", seed=1,
        ...                    progress_bar=False, **settings)
        >>> check_exact_resume(make_trainer, stops=["3ba", "1ep"])
    """
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(folder or temporary)
        whole_batches, whole = _train(make_trainer, base / "whole")
        for index, stop in enumerate(stops):
            first, stopped = _train(make_trainer, base / f"stop{index}", stop)
            rest, resumed = _train(make_trainer, base / f"stop{index}")
            is_late = isinstance(stop, str) and stopped.timestamp.batch >= whole.timestamp.batch
            if is_late or stopped.stop_reason in {None, whole.stop_reason}:
                raise ValueError(f"stops must be before the end of the run, at {whole.timestamp.batch}, got {stop!r}.")
            _compare(first + rest, whole_batches, f"stopped after {len(first)} batches: batch")
            _compare(_leaves(resumed), _leaves(whole), f"stopped after {len(first)} batches: value")


def _train(
    make_trainer: Callable[..., Trainer], folder: Path, stop: str | Callable[[Trainer], object] | None = None
) -> tuple[list[tuple[str, str]], State]:
    """Train, and return the digest of each batch by its time, and the state at the end."""
    trainer = make_trainer(run_name="run", save_folder=str(folder), save_interval="1000000ba", autoresume=True)
    batches: list[tuple[str, str]] = []

    def store(state: State, _: object) -> None:
        batches.append((f"{state.timestamp.batch}", _digest(state.batch)))

    with trainer:
        trainer.engine.on("after_dataloader", store)
        if callable(stop):
            stop(trainer)
        elif stop is not None:  # not a duration of fit, which would be the end of the schedules
            moment = Time.from_input(stop, name="stops")

            def end(state: State, _: object) -> None:
                if state.has_reached(moment):  # in all processes at once
                    # As a signal: algorithms that did nothing before it may do so in the resumed run.
                    state.stop_reason, state.max_duration = STOPPED_BY_SIGNAL, state.timestamp.batch

            for event in ("batch_end", "epoch_end"):
                trainer.engine.on(event, end)
        trainer.fit()
    return batches, trainer.state


def _leaves(state: State) -> list[tuple[str, str]]:
    """Return the digests of the weights and of the optimizers' values by name."""
    values = {"model": state.model.state_dict(), "optimizers": [it.state_dict() for it in state.optimizers]}
    leaves, _ = _pytree.tree_flatten_with_path(values)
    return [(_pytree.keystr(path), _digest(leaf)) for path, leaf in leaves]


def _compare(ours: list[tuple[str, str]], expected: list[tuple[str, str]], what: str) -> None:
    for (name, value), (other_name, other) in zip(ours, expected, strict=False):
        assert name == other_name, f"{what} {name} of the resumed run is {other_name} of the uninterrupted one."
        assert value == other, f"{what} {name} differs from that of the uninterrupted run."
    assert len(ours) == len(expected), f"{what}: {len(ours)} instead of {len(expected)} in the uninterrupted run."


def _digest(value: Any) -> str:
    """Return a digest of nested values, of tensors with their dtype and bytes."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in _pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensor = leaf.detach().cpu().contiguous()
            found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()

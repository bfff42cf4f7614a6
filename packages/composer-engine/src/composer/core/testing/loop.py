"""A small deterministic training with every event, for tests. It can be stopped and resumed."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from composer.core.base import rebuild_algorithm
from composer.core.engine import Engine
from composer.core.event import Event
from composer.core.saving.codec import NotSerializableError, join_tensors, split_tensors
from composer.core.saving.components import settings_to_save
from composer.core.saving.randomness import derive_seed, preserve_rng_state, seed_globals
from composer.core.step import Step
from composer.core.time import Timestamp, TimeUnit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from composer.core.base import Algorithm
    from composer.core.data.batches import Batch
    from composer.core.state import State


@contextlib.contextmanager
def seeded(*words: object) -> Iterator[None]:
    """Seed the global generators of Python, torch and, where imported, NumPy by the words; restore them at the end.

    Example:
        >>> with seeded("epoch", 3):
        ...     one = torch.rand(1)
        >>> with seeded("epoch", 3):
        ...     one == torch.rand(1)
        tensor([True])
    """
    with preserve_rng_state():
        seed = derive_seed(*words)
        torch.manual_seed(seed)  # of every device
        seed_globals(seed)
        yield


@attrs.define
class Training:
    """A training that runs every event, with an evaluation after each epoch, like :class:`composer.Trainer`.

    Draws of layers and data from global generators depend only on batch and epoch, as if the states of the generators
    were loaded from a checkpoint.

    Args:
        state: A state with a model, optimizers and a ``train_dataloader``.
        algorithms: The algorithms to run.
        loaded: The return value of :meth:`save` to resume from.
        make_engine: Creates the engine.

    Example:
        >>> from composer.core import State
        >>> class Mean(nn.Linear):
        ...     def loss(self, outputs, batch):
        ...         return outputs.mean()
        >>> training = Training(State(Mean(2, 1), train_dataloader=[torch.ones(4, 2)] * 3), [])
        >>> training.run(until=4)
        >>> training.engine.state.timestamp.epoch, sorted(training.losses)
        (Time(1, TimeUnit.EPOCH), [0, 1, 2, 3])
    """

    state: State
    algorithms: Sequence[Algorithm]
    loaded: dict[str, Any] | None = None
    make_engine: Callable[..., Engine] = Engine
    engine: Engine = attrs.field(init=False)
    losses: dict[int, Tensor] = attrs.field(factory=dict, init=False)
    _step: Step = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        state = self.state
        loader = state.train_dataloader
        state.set_dataloader(loader, "train", state.train_data_spec.length if state.train_data_spec else None)
        self.engine = self.make_engine(state, algorithms=list(self.algorithms))
        with seeded("preparation"):
            for event in (Event.INIT, Event.BEFORE_LOAD):
                self.engine.run_event(event)
            if self.loaded is not None:
                self._load(self.loaded)
            for event in (Event.AFTER_LOAD, Event.FIT_START):
                self.engine.run_event(event)
        self._step = Step(state, self.engine.calls, state.compute_outputs, state.compute_loss)
        self._set_mode(train=True)

    def run(self, until: int) -> None:
        """Train until this number of batches is done, and end the epoch if it has no further batch."""
        state, event = self.state, self.engine.run_event
        while self._done() < until:
            if not self._done(in_epoch=True):
                event(Event.ITERATION_START)
                event(Event.EPOCH_START)
            epoch = int(state.timestamp.count(TimeUnit.EPOCH))
            with seeded("epoch", epoch):
                # All at once, so that the draws of the loader do not depend on where the training resumes.
                batches = list(state.train_dataloader or ())
            for batch in batches[self._done(in_epoch=True) :]:
                if self._done() < until:
                    with seeded("batch", self._done()):
                        self._train_batch(batch)
            if self._done(in_epoch=True) < len(batches):
                return
            self._end_epoch(batches[0])

    def begin_again(self) -> Training:
        """Reset the clock for another fit of the same model, and return the training."""
        self.state.timestamp = self.state.previous_timestamp = Timestamp()
        self.losses.clear()
        with seeded("preparation"):
            self.engine.run_event(Event.FIT_START)
        return self

    def finish(self) -> None:
        """Run a prediction, and end the training."""
        with seeded("prediction"):
            batch = next(iter(self.state.train_dataloader or ()))
            self._watch("predict", batch)
        self.engine.run_event(Event.FIT_END)
        self.engine.close()

    def save(self) -> dict[str, Any]:
        """Return copies of everything that a resumed training needs."""
        state = self.state
        saved = {
            "model": state.model.state_dict() if isinstance(state.model, nn.Module) else {},
            "optimizers": [optimizer.state_dict() for optimizer in state.optimizers],
            "algorithms": [through_json(algorithm.state_dict()) for algorithm in state.algorithms],
            "added": [
                {"name": type(one).__name__, "settings": settings_to_save(one)}
                for one in state.algorithms[len(self.algorithms) :]
            ],
            "timestamp": state.timestamp.state_dict(),
        }
        return copy.deepcopy(saved)

    def _load(self, saved: dict[str, Any]) -> None:
        saved, state = copy.deepcopy(saved), self.state
        for record in saved["added"]:  # by others in training
            state.algorithms.append(added := rebuild_algorithm(record))
            added.apply(Event.INIT, state, self.engine.logger)
        if isinstance(state.model, nn.Module):
            state.model.load_state_dict(saved["model"])
        for optimizer, state_dict in zip(state.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state_dict)
        for algorithm, state_dict in zip(state.algorithms, saved["algorithms"], strict=True):
            algorithm.load_state_dict(state_dict)
        state.timestamp = Timestamp.from_state_dict(saved["timestamp"])

    def _done(self, *, in_epoch: bool = False) -> int:
        return int(self.state.timestamp.count(TimeUnit.BATCH, in_epoch=in_epoch))

    def _train_batch(self, batch: Batch) -> None:
        state = self.state
        samples = state.train_data_spec.get_num_samples_in_batch(batch) if state.train_data_spec else 0
        state.microbatch = -1
        self.engine.run_event(Event.BEFORE_DATALOADER)
        self._step.begin_batch(batch)
        # A single optimizer gets the closure, which SAM calls several times; several share the gradients of one call.
        if len(state.optimizers) == 1:
            state.optimizers[0].step(self._step.compute_gradients)  # type: ignore[arg-type]  # it takes tensors
        else:
            self._step.compute_gradients()
            for optimizer in state.optimizers:
                optimizer.step()
        self.losses[self._done()] = self._step.losses["total"].clone()
        self._step.end_batch(samples)

    def _end_epoch(self, batch: Batch) -> None:
        state, event = self.state, self.engine.run_event
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_epoch()
        with seeded("end of epoch", int(state.timestamp.count(TimeUnit.EPOCH))):
            event(Event.EPOCH_END)
            event(Event.EVAL_BEFORE_ALL)
            self._watch("eval", batch)
            event(Event.EVAL_AFTER_ALL)
            event(Event.EPOCH_CHECKPOINT)
            state.timestamp = state.timestamp.to_next_iteration()
            event(Event.ITERATION_END)
            event(Event.ITERATION_CHECKPOINT)

    def _watch(self, what: str, batch: Batch) -> None:
        """Run the model on a batch with the events of an evaluation (``"eval"``) or a prediction (``"predict"``)."""
        state, event = self.state, self.engine.run_event
        self._set_mode(train=False)
        with torch.no_grad():
            event(f"{what}_start")
            state.batch = batch
            event(f"{what}_batch_start")
            event(f"{what}_before_forward")
            state.outputs = state.compute_outputs(state.batch)
            event(f"{what}_after_forward")
            event(f"{what}_batch_end")
            event(f"{what}_end")
        self._set_mode(train=True)

    def _set_mode(self, *, train: bool) -> None:
        if isinstance(self.state.model, nn.Module):
            self.state.model.train(train)


def through_json(value: Any) -> Any:
    """Return saved state after a round trip through JSON, with the same tensors.

    Raises:
        AssertionError: It contains something that cannot be saved.

    Example:
        >>> through_json({"depth": 3, "weights": [torch.ones(1)]})
        {'depth': 3, 'weights': [tensor([1.])]}
    """
    try:
        data, tensors = split_tensors(value)
    except NotSerializableError as error:
        raise AssertionError(f"state_dict(): {error}") from None
    return join_tensors(json.loads(json.dumps(data)), tensors)

"""The step of a training batch, the same in every loop, and a check of loops that run its events themselves."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from composer.core.data_spec import note_batch
from composer.core.event import MODEL_EVENTS, STEP_EVENTS, Event
from composer.core.model_state import held_parameters, wants_closure
from composer.core.randomness import global_rng_states
from composer.core.time import TimeUnit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from composer.core.data_spec import Batch
    from composer.core.plan import Entry
    from composer.core.state import State

__all__ = ["LoopCheck", "Step", "total_of"]

_TRAINING = frozenset({Event.ITERATION_START, Event.EPOCH_START, *STEP_EVENTS})
_AFTER_A_STEP = frozenset({Event.BATCH_END, Event.EPOCH_END, Event.FIT_END})


class Step:
    """Runs the events of a batch, and computes its gradients between them.

    The part of the drawing in :class:`~composer.core.Event` from a batch to its gradients::

        begin_batch(batch)                  AFTER_DATALOADER, BATCH_START
        compute_gradients()
            begin_gradients()               BEFORE_TRAIN_BATCH
            for state.batch in split():
                backward(compute_loss())    BEFORE_FORWARD to BEFORE_BACKWARD
                                            AFTER_BACKWARD
            complete()
                                            AFTER_TRAIN_BATCH
        step of the optimizers
        end_batch()                         BATCH_END, BATCH_CHECKPOINT

    A loop that calls the model and the backward pass itself calls :meth:`begin_gradients` and :meth:`compute_loss`
    instead of :meth:`compute_gradients`. An optimizer may compute the gradients several times in a step: all draws
    are repeated. Events are named by their values, which saves a look-up of an enum's member at each of them.

    Args:
        state: The state. Its ``microbatch`` is the place in the step: the index of the microbatch, -1 before the batch
            is split, -2 between batches.
        run_event: ``f(event)``.
        forward: ``f(batch) -> outputs``.
        loss: ``f(outputs, batch) -> loss``.
        split: ``f()``, which returns the microbatches of ``state.batch``, each with its weight in the sum of the
            losses; the batch is not split if None.
        complete: ``f()``, called once after the last backward pass, to average and unscale the gradients.

    Attributes:
        total: The loss of the batch, the sum over its microbatches, without its graph.
        losses: The losses to log, by name: those of the first computation in a step, as later ones are computed at
            trial weights.
        times_computed: How often the gradients of the batch have been computed, including the current computation.

    Example:
        >>> from composer.core import Engine, State
        >>> class Mean(torch.nn.Linear):
        ...     def loss(self, outputs, batch):
        ...         return outputs.mean()
        >>> state = State(Mean(2, 1))
        >>> step = Step(state, Engine(state).run_event, state.compute_outputs, state.compute_loss)
        >>> step.begin_batch(torch.zeros(4, 2)).shape
        torch.Size([4, 2])
        >>> step.compute_gradients() == state.model.bias, state.model.bias.grad
        (tensor([True]), tensor([1.]))
    """

    total: Tensor

    def __init__(
        self,
        state: State,
        run_event: Callable[[str], object],
        forward: Callable[[Batch], Any],
        loss: Callable[[Any, Batch], Any],
        *,
        split: Callable[[], Iterable[tuple[Batch, float]]] | None = None,
        complete: Callable[[], object] | None = None,
    ) -> None:
        self.forward, self.loss, self.complete = forward, loss, complete
        self.losses: dict[str, Tensor] = {}
        self.times_computed = 0
        self._state, self._event = state, run_event
        self._split = split or (lambda: ((state.batch, 1.0),))
        self._parts: dict[str, Tensor] = {}
        self._rng_states: list[tuple[Callable[[Any], object], Any]] = []
        self._computes_again = any(map(wants_closure, state.optimizers))
        self._create_graph = any(algorithm.backwards_create_graph for algorithm in state.algorithms)

    def begin_batch(self, batch: Batch) -> Batch:
        """Return a batch as algorithms have changed it; further batches of a step are its microbatches."""
        state, event = self._state, self._event
        is_first = state.microbatch < 0
        state.microbatch = -1 if is_first else state.microbatch + 1
        state.batch = batch
        event("after_dataloader")
        if is_first:
            self.times_computed = 0
            event("batch_start")
        return state.batch

    def compute_gradients(self) -> Tensor:
        """Compute the gradients of ``state.batch``, and return its loss: the closure for an optimizer."""
        state, event = self._state, self._event
        self.begin_gradients()
        # The stored field, because a property would be a further call in each step.
        for optimizer in state._optimizers:  # noqa: SLF001
            optimizer.zero_grad()
        whole_batch = state.batch
        for state.microbatch, (state.batch, weight) in enumerate(self._split()):
            self._backward(self.compute_loss(), weight)
            event("after_backward")
            self._add_losses(state.loss, weight)
        state.batch = whole_batch
        if self.complete is not None:
            self.complete()
        event("after_train_batch")
        return self.total

    def begin_gradients(self) -> None:
        """Begin to compute the gradients of a batch, with the draws of the first time in this step."""
        self._state.microbatch = -1
        self._event("before_train_batch")
        if self.times_computed:
            self._state.restart_draws()
            for set_state, before in self._rng_states:
                set_state(before)
        # Only for optimizers that compute again, as copying the states takes time in each step.
        elif self._computes_again:
            self._rng_states = global_rng_states(self._state.device)
        self.times_computed += 1

    def compute_loss(self) -> Any:
        """Return the loss of ``state.batch``, before any scaling of it."""
        state, event = self._state, self._event
        # Free the last graph before the next one is built, so that its memory is reused while it is in the cache.
        state.outputs = state.loss = None
        event("before_forward")
        try:
            state.outputs = self.forward(state.batch)
        except Exception as error:
            self._note_batch(error, "before_forward", "")
            raise
        event("after_forward")
        event("before_loss")
        try:
            state.loss = self.loss(state.outputs, state.batch)
        except Exception as error:
            self._note_batch(error, "before_loss", ".loss")
            raise
        event("after_loss")
        event("before_backward")
        return state.loss

    def end_batch(self, samples: int, tokens: int = 0) -> None:
        """Advance the clock by a batch, after the step of the optimizers."""
        state = self._state
        state.microbatch = -2
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(samples, tokens)
        self._event("batch_end")
        self._event("batch_checkpoint")

    def scale_losses(self, factor: float) -> None:
        """Multiply the losses of the current computation."""
        self._set_losses({name: part * factor for name, part in self._parts.items()})

    def _backward(self, loss: Any, weight: float) -> None:
        """Add the gradients of a microbatch's loss times its weight."""
        state = self._state
        total = loss if isinstance(loss, Tensor) else total_of(loss)
        if weight != 1:
            total = total * weight
        if state.scaler is not None:
            total = state.scaler.scale(total)
        try:
            torch.autograd.backward(total, create_graph=self._create_graph)
        except RuntimeError:
            # After an error only, so that a step does not pay for the check.
            _check_loss(total, type(state.model).__name__)
            raise

    def _add_losses(self, loss: Any, weight: float) -> None:
        if isinstance(loss, Tensor) and weight == 1:
            parts = {"total": loss.detach()}  # the usual case
        else:
            several = {} if isinstance(loss, Tensor) else _by_name(loss)
            parts = {name: one.detach() * weight for name, one in {"total": total_of(loss), **several}.items()}
        if self._state.microbatch > 0:
            parts = {name: self._parts[name] + part for name, part in parts.items()}
        self._set_losses(parts)

    def _set_losses(self, parts: dict[str, Tensor]) -> None:
        self._parts, self.total = parts, parts["total"]
        if self.times_computed == 1:
            self.losses = parts
            self._state.total_loss = self.total

    def _note_batch(self, error: Exception, event: str, method: str) -> None:
        note_batch(error, event, f"{type(self._state.model).__name__}{method}", self._state.batch)


def total_of(loss: Any) -> Tensor:
    """Return the loss to minimize: a tensor as it is; of several losses the one named ``"total"``, or else their sum.

    Raises:
        TypeError: ``loss`` is neither a tensor nor a dictionary or sequence of tensors.
    """
    if isinstance(loss, Tensor):
        return loss
    several = list(loss.values()) if isinstance(loss, Mapping) else loss
    if not isinstance(several, (list, tuple)) or not several or not all(isinstance(one, Tensor) for one in several):
        raise TypeError(f"The model's loss must be a tensor, or a dictionary or sequence of tensors, got {loss!r}.")
    total: Tensor = loss["total"] if isinstance(loss, Mapping) and "total" in loss else sum(several[1:], several[0])
    return total


def _by_name(losses: Mapping[str, Tensor] | Iterable[Tensor]) -> Mapping[str, Tensor]:
    return losses if isinstance(losses, Mapping) else {f"loss{index}": one for index, one in enumerate(losses)}


def _check_loss(loss: Tensor, model: str) -> None:
    """Raise a ValueError if a loss has no gradient."""
    if loss.numel() != 1:
        raise ValueError(
            f"The loss of {model} must be one number, got a tensor of the shape {list(loss.shape)}: return its mean."
        )
    if not loss.requires_grad:
        raise ValueError(
            f"The loss of {model} does not depend on any weight that is trained (its requires_grad is False). Was it "
            "computed by detach(), item(), argmax() or under torch.no_grad(), or are all weights frozen?"
        )


class LoopCheck:
    """Warns once about each algorithm whose events the loop does not run, and about optimizers that do not step.

    The engine calls :meth:`notice` when an event runs for the first time since the plan was made; later runs cost
    nothing. The steps of optimizers are observed until the first ``batch_end`` after one of them.

    Args:
        state: The state with the clock and the optimizers.
        on_step: Called after the step of an observed optimizer; :meth:`notice` must be called at the next
            ``batch_end``, also if it is not the first one.

    Example:
        >>> from composer.core import State
        >>> LoopCheck(State(model=None)).has_batches
        False
    """

    def __init__(self, state: State, on_step: Callable[[], object] = lambda: None) -> None:
        self._state = state
        self._steps = _Steps(state, on_step)
        self._ran: set[Event] = set()
        self._prepared: dict[Event, list[object]] = {event: [] for event in Event if event in MODEL_EVENTS}
        self._reported: set[tuple[str, Event]] = set()
        self._first_epoch: int | None = None

    @property
    def has_batches(self) -> bool:
        """Whether any event of a batch has run."""
        return not self._ran.isdisjoint(STEP_EVENTS)

    def notice(self, event: Event, entries: Mapping[Event, Sequence[Entry]]) -> None:
        """Record that an event runs, and warn about events that should have run before."""
        self._ran.add(event)
        if event in self._prepared:
            self._prepared[event] += [entry.component for entry in entries.get(event, ())]
        for missed, keys, text in self._missed(event, entries):
            new = [key for key in keys if (key, missed) not in self._reported]
            self._reported.update((key, missed) for key in new)
            if new:
                shown = new if len(new) <= 3 else [*new[:3], f"{len(new) - 3} more"]
                names = " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
                who = f"{names} {'runs' if len(new) == 1 else 'run'}"
                warnings.warn(f"{who} at {missed.value!r}, but {text}", UserWarning, stacklevel=4)
        if event in _TRAINING:
            self._steps.begin()
        if event in _AFTER_A_STEP:
            for text in self._steps.passed_over():
                warnings.warn(text, UserWarning, stacklevel=4)

    def close(self) -> None:
        """Stop observing optimizers."""
        self._steps.end()

    def _missed(self, event: Event, entries: Mapping[Event, Sequence[Entry]]) -> Iterator[tuple[Event, list[str], str]]:
        """Yield events, the keys of the algorithms that missed them, and the rest of the sentence about these."""
        expected: Iterable[Event] = ()
        if event in _TRAINING:
            if self._first_epoch is None:
                self._first_epoch = self._epoch()
            expected, what = self._prepared, "training begins"
        elif event is Event.EPOCH_END and self.has_batches:
            expected, what = [Event.EPOCH_START, *STEP_EVENTS], "a whole epoch passed"
        elif event is Event.FIT_END and self.has_batches:
            epochs = [Event.EPOCH_START, Event.EPOCH_END] if self._epoch() > (self._first_epoch or 0) else []
            expected, what = [*STEP_EVENTS, *epochs], "the training ended"
        for missed in expected:
            # Components without a stage are called everywhere by ``match``, or only observe.
            needing = [entry for entry in entries.get(missed, ()) if entry.stage is not None]
            if missed not in self._ran:
                remedy = f'Add engine.run_event("{missed.value}") to the loop: {missed.place}.'
                text = f"{what} without that event, so nothing is done there. {remedy}"
                yield missed, [entry.key for entry in needing], text
            elif missed in self._prepared:
                # Algorithms that were rebuilt from a checkpoint have run when it was loaded.
                ran = {id(component) for component in (*self._prepared[missed], *self._state.made_on_load)}
                late = [entry.key for entry in needing if id(entry.component) not in ran]
                yield missed, late, "was added after it. Pass algorithms to the engine or trainer at construction."

    def _epoch(self) -> int:
        return int(self._state.timestamp.count(TimeUnit.EPOCH))


# Weak, so that an engine that is never closed is still freed.
_observers: weakref.WeakSet[_Steps] = weakref.WeakSet()
_handles: list[RemovableHandle] = []
"""The hook of torch's optimizers that reports to the observers, if there are any."""


def _note_step(optimizer: Optimizer, *_: object) -> None:
    for steps in list(_observers):
        steps.note(optimizer)


class _Steps:
    """Records which optimizers step: those of the state, or others with the same parameters.

    An optimizer that has not stepped may be correct: gradients are accumulated over several batches, or were infinite.
    It is an error if another optimizer, such as the one that it wraps, has stepped instead.
    """

    def __init__(self, state: State, on_step: Callable[[], object]) -> None:
        self._state, self._on_step = state, on_step
        self._own: list[Optimizer] = []
        self._others: list[Optimizer] = []
        self._has_begun = False

    def begin(self) -> None:
        """Observe all optimizers of the process, as the loop may step any of them."""
        if not self._has_begun:
            self._has_begun = True
            _observers.add(self)
            if not _handles:
                _handles.append(register_optimizer_step_post_hook(_note_step))

    def end(self) -> None:
        """Stop observing optimizers; not to be called by a step of one, which iterates over its hooks."""
        _observers.discard(self)
        if not _observers and _handles:
            _handles.pop().remove()

    def note(self, optimizer: Optimizer) -> None:
        """Record the step of an optimizer, if it is in the state or shares parameters with one that is."""
        is_own = _is_in(optimizer, self._state.optimizers)
        noted = self._own if is_own else self._others
        if not _is_in(optimizer, noted) and (is_own or any(_shares(optimizer, one) for one in self._state.optimizers)):
            noted.append(optimizer)
            self._on_step()

    def passed_over(self) -> Iterator[str]:
        """Yield a sentence for each optimizer of the state instead of which another one has stepped."""
        if not self._own and not self._others:
            return
        self.end()
        for optimizer in self._state.optimizers:
            # The steps of a class that does not call Optimizer.__init__ run no hooks.
            is_seen = getattr(type(optimizer).step, "hooked", False)
            instead = [one for one in self._others if _shares(one, optimizer)]
            if is_seen and instead and not _is_in(optimizer, self._own):
                yield (
                    f"{type(optimizer).__name__} is in state.optimizers and has not stepped, but "
                    f"{type(instead[0]).__name__}, which is not, has stepped with its parameters. Algorithms may "
                    "replace the optimizers before training: take them from state.optimizers after the events 'init' "
                    "to 'fit_start'."
                )
        self._own, self._others = [], []


def _is_in(optimizer: Optimizer, optimizers: Iterable[Optimizer]) -> bool:
    return any(optimizer is one for one in optimizers)


def _shares(one: Optimizer, other: Optimizer) -> bool:
    parameters = {id(parameter) for parameter in held_parameters(one.param_groups)}
    return any(id(parameter) in parameters for parameter in held_parameters(other.param_groups))

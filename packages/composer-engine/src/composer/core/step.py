"""The events of a training batch and its gradients, for the Trainer, adapters of other trainers, and loops of tests.

:class:`Step` runs them. It calls functions for the parts in which loops differ: the forward pass, the loss, the split
into microbatches, and what completes the gradients. In a host whose users write forward pass and loss in one function,
:class:`SplitStep` makes these two functions of it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from composer.core.data.batches import note_batch
from composer.core.optimizers import wants_closure
from composer.core.saving.randomness import global_rng_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from composer.core.data.batches import Batch
    from composer.core.interval import Call
    from composer.core.state import State

    Microbatch: TypeAlias = tuple[Batch, float | Tensor]
    """A microbatch, and its weight in the sum of the losses: a number or a tensor of one."""

# cuBLAS and cuDNN report allocations that fail by a RuntimeError with these codes, and not by an OutOfMemoryError.
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class Step:
    """Runs the events of a batch, and computes its gradients between them.

    The part of the drawing in :class:`~composer.core.Event` from a batch to its gradients::

        begin_batch(batch)                  AFTER_DATALOADER, BATCH_START
        compute_gradients()
            begin_gradients()               BEFORE_TRAIN_BATCH
            for state.batch in split():
                backward(compute_loss())    BEFORE_FORWARD to BEFORE_BACKWARD
                                            AFTER_BACKWARD
                measure(batch)
            complete()
                                            AFTER_TRAIN_BATCH
        step of the optimizers, which may call compute_gradients() themselves
        end_batch()                         BATCH_END, BATCH_CHECKPOINT

    The Trainer, which exchanges counts with other processes and steps schedulers, runs the last two events itself, and
    does not call :meth:`end_batch`. An adapter, whose host calls the backward pass, calls :meth:`begin_gradients` and
    :meth:`compute_loss` instead of :meth:`compute_gradients`. An optimizer may compute the gradients several times in a
    step: all draws are repeated. Events are named by their values, which saves a look-up of an enum's member at each.

    Args:
        state: The state. Its ``microbatch`` is the index of the microbatch, -1 before the batch is split, -2 between
            batches.
        calls: The calls of each event, ``engine.calls``.
        forward: ``f(batch) -> outputs``.
        loss: ``f(outputs, batch) -> loss``.
        split: ``f()``, which returns the microbatches of ``state.batch``, each with its weight in the sum of the
            losses, a number or a tensor of one; the batch is not split if None.
        complete: ``f()``, called once after the last backward pass, to average and unscale the gradients.
        measure: ``f(batch)``, called after each microbatch with a copy of it from before its forward pass, in which
            algorithms may change its targets.

    Attributes:
        total: The loss of the batch, the sum over its microbatches, without its graph.
        losses: The losses to log, by name: those of the first computation in a step, as later ones are computed at
            trial weights.
        times_computed: How often the gradients of the batch have been computed, including the current computation.
        frees_outputs: Whether ``state.outputs`` becomes None before the backward pass, which then can use the memory.

    Example:
        >>> from composer.core import Engine, State
        >>> class Mean(torch.nn.Linear):
        ...     def loss(self, outputs, batch):
        ...         return outputs.mean()
        >>> state = State(Mean(2, 1))
        >>> step = Step(state, Engine(state).calls, state.compute_outputs, state.compute_loss)
        >>> step.begin_batch(torch.zeros(4, 2)).shape
        torch.Size([4, 2])
        >>> step.compute_gradients() == state.model.bias, state.model.bias.grad
        (tensor([True]), tensor([1.]))
    """

    total: Tensor

    def __init__(
        self,
        state: State,
        calls: Mapping[str, Iterable[Call]],
        forward: Callable[[Batch], Any],
        loss: Callable[[Any, Batch], Any],
        *,
        split: Callable[[], Iterable[Microbatch]] | None = None,
        complete: Callable[[], object] | None = None,
        measure: Callable[[Batch], object] | None = None,
    ) -> None:
        self.forward, self.loss, self.complete, self.measure = forward, loss, complete, measure
        self.losses: dict[str, Tensor] = {}
        self.times_computed = 0
        self.frees_outputs = False
        self._state, self._calls = state, calls
        self._split = split or (lambda: ((state.batch, 1.0),))
        self._parts: dict[str, Tensor] = {}
        self._rng_states: list[tuple[Callable[[Any], object], Any]] = []
        self.computes_again = any(map(wants_closure, state.optimizers))
        self._create_graph = any(algorithm.backwards_create_graph for algorithm in state.algorithms)

    def begin_batch(self, batch: Batch) -> Batch:
        """Return a batch as algorithms have changed it; within a step, batches after the first are microbatches."""
        state, calls = self._state, self._calls
        # Negative before and between steps. A host that accumulates gradients begins several batches in one step.
        is_first = state.microbatch < 0
        state.microbatch = -1 if is_first else state.microbatch + 1
        state.batch = batch
        for call in calls["after_dataloader"]:
            call()
        if is_first:
            self.times_computed = 0
            for call in calls["batch_start"]:
                call()
        return state.batch

    def compute_gradients(self) -> Tensor:
        """Compute the gradients of ``state.batch``, and return its loss: the closure for an optimizer."""
        state, calls = self._state, self._calls
        self.begin_gradients()
        # Zeroed here and not after the step, because an optimizer may call this closure several times.
        # The stored field, because a property would be a further call in each step.
        for optimizer in state._optimizers:  # noqa: SLF001
            optimizer.zero_grad()
        whole_batch = state.batch
        for index, (batch, weight) in enumerate(self._split()):
            state.microbatch, state.microbatch_weight, state.batch = index, weight, batch
            original = copy.copy(batch) if self.measure is not None else None
            loss = self.compute_loss()
            if self.frees_outputs:
                state.outputs = None
            self._backward(loss, weight)
            for call in calls["after_backward"]:
                call()
            self._add_losses(state.loss, weight)
            if self.measure is not None:
                self.measure(original)
        state.batch = whole_batch
        if self.complete is not None:
            self.complete()
        for call in calls["after_train_batch"]:
            call()
        return self.total

    def begin_gradients(self) -> None:
        """Begin to compute the gradients of a batch, with the draws of the first time in this step."""
        self._state.microbatch = -1
        for call in self._calls["before_train_batch"]:
            call()
        if self.times_computed:
            self._state.restart_draws()
            for set_state, before in self._rng_states:
                set_state(before)
        # Only for optimizers that compute again, as copying the states takes time in each step.
        elif self.computes_again:
            self._rng_states = global_rng_states(self._state.device)
        self.times_computed += 1

    def compute_loss(self) -> Any:
        """Return the loss of ``state.batch``, before any scaling of it."""
        state, calls = self._state, self._calls
        # Free the last graph before the next one is built, so that its memory is reused while it is in the cache.
        state.outputs = state.loss = None
        for call in calls["before_forward"]:
            call()
        try:
            state.outputs = self.forward(state.batch)
        except Exception as error:
            note_batch(error, "before_forward", state.model, "", state.batch)
            raise
        for call in calls["after_forward"]:
            call()
        for call in calls["before_loss"]:
            call()
        try:
            state.loss = self.loss(state.outputs, state.batch)
        except Exception as error:
            note_batch(error, "before_loss", state.model, ".loss", state.batch)
            raise
        for call in calls["after_loss"]:
            call()
        for call in calls["before_backward"]:
            call()
        return state.loss

    def end_batch(self, samples: int, tokens: int = 0) -> None:
        """Advance the clock by a batch, after the step of the optimizers."""
        state = self._state
        state.microbatch = -2
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(samples, tokens)
        for call in self._calls["batch_end"]:
            call()
        for call in self._calls["batch_checkpoint"]:
            call()

    def scale_losses(self, factor: float) -> None:
        """Multiply the losses of the current computation."""
        self._parts = {name: part * factor for name, part in self._parts.items()}
        self.total = self._parts["total"]
        if self.times_computed == 1:
            self.losses, self._state.total_loss = self._parts, self.total

    def _backward(self, loss: Any, weight: float | Tensor) -> None:
        """Add the gradients of a microbatch's loss times its weight."""
        state = self._state
        total = loss if isinstance(loss, Tensor) else total_of(loss)
        if type(weight) is not float or weight != 1:
            total = _weighted(total, weight)
        if state.scaler is not None:
            total = state.scaler.scale(total)
        try:
            torch.autograd.backward(total, create_graph=self._create_graph)
        except RuntimeError:
            # After an error only, so that a step does not pay for the check.
            _check_loss(total, type(state.model).__name__)
            raise

    def _add_losses(self, loss: Any, weight: float | Tensor) -> None:
        if isinstance(loss, Tensor) and type(weight) is float and weight == 1:
            parts = {"total": loss.detach()}  # the usual case
        else:
            several = {} if isinstance(loss, Tensor) else losses_by_name(loss)
            losses = {"total": total_of(loss), **several}
            parts = {name: _weighted(part.detach(), weight) for name, part in losses.items()}
        if self._state.microbatch > 0:
            if parts.keys() != self._parts.keys():
                raise ValueError(
                    "The model's loss must have the same parts for all microbatches of a batch, got "
                    f"{', '.join(parts)} after {', '.join(self._parts)}. Return 0 for a part that a microbatch lacks."
                )
            parts = {name: self._parts[name] + part for name, part in parts.items()}
        self._parts, self.total = parts, parts["total"]
        if self.times_computed == 1:
            self.losses, self._state.total_loss = parts, self.total


def total_of(loss: Any) -> Tensor:
    """Return the loss to minimize: a tensor as it is; of several losses the one named ``"total"``, or else their sum.

    Raises:
        TypeError: ``loss`` is neither a tensor nor a dictionary or sequence of tensors.
    """
    if isinstance(loss, Tensor):
        return loss
    several = list(loss.values()) if isinstance(loss, Mapping) else loss
    if not isinstance(several, (list, tuple)) or not several or not all(isinstance(part, Tensor) for part in several):
        advice = " A model of Transformers returns one only if it is called with labels." if loss is None else ""
        raise TypeError(
            f"The model's loss must be a tensor, or a dictionary or sequence of tensors, got {loss!r}.{advice}"
        )
    total: Tensor = loss["total"] if isinstance(loss, Mapping) and "total" in loss else sum(several[1:], several[0])
    return total


def _weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Return a loss times its weight, which is not compared on the host if it is a tensor."""
    # The mean over nothing is nan, and has the weight 0.
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, loss) * weight
    return (loss if weight else loss.nan_to_num()) * weight


def losses_by_name(losses: Mapping[str, Tensor] | Iterable[Tensor]) -> Mapping[str, Tensor]:
    """Return several losses by name: those of a dictionary by their keys, others as ``loss0`` and so on."""
    return losses if isinstance(losses, Mapping) else {f"loss{index}": loss for index, loss in enumerate(losses)}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, reports that a device is out of memory.

    Example:
        >>> is_out_of_memory(torch.OutOfMemoryError("no room")), is_out_of_memory(RuntimeError("no"))
        (True, False)
    """
    while error is not None:
        is_reported = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
        if is_reported or isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


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


class SplitStep:
    """Splits a function that computes the loss of a batch into a forward pass and a loss.

    For hosts whose users write both in one function, such as a ``training_step``. The forward pass runs the function
    until it calls the module, and stops there; the loss runs it again, and the module returns the outputs that it is
    given. So code before the call of the module runs twice in a step, the module once. If the function calls the module
    several times, the outputs are those of the first call.

    Args:
        step: ``f(batch) -> loss``.
        module: The module whose results are the outputs.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> split = SplitStep(lambda batch: (model(batch[0]) - batch[1]).square().mean(), model)
        >>> outputs = split.forward((torch.ones(4, 2), torch.ones(4, 1)))
        >>> outputs.shape, split.loss(outputs, (None, outputs.detach())).item()
        (torch.Size([4, 1]), 0.0)
    """

    def __init__(self, step: Callable[[Batch], Any], module: nn.Module) -> None:
        self._step, self._module = step, module

    def forward(self, batch: Batch) -> Any:
        """Return the outputs of the module for a batch.

        Raises:
            RuntimeError: The function did not call the module.
        """
        forward = self._module.forward

        def stop(*args: Any, **kwargs: Any) -> Any:
            raise StopStep(forward(*args, **kwargs))

        try:
            self._run(batch, stop)
        except StopStep as stopped:
            return stopped.args[0]
        name = type(self._module).__name__
        raise RuntimeError(
            f"The function of a training step did not call {name}, so its outputs are unknown. Pass the module whose "
            "outputs the loss is computed from."
        )

    def loss(self, outputs: Any, batch: Batch) -> Any:
        """Return the loss of the outputs."""
        return self._run(batch, lambda *_, **__: outputs)

    def _run(self, batch: Batch, forward: Callable[..., Any]) -> Any:
        """Call the function with another forward function of the module, until that is called."""
        with contextlib.ExitStack() as until_called:

            def call(*args: Any, **kwargs: Any) -> Any:
                until_called.close()
                return forward(*args, **kwargs)

            # An attribute of the object hides the method of its class, also where hooks or wrappers call the module.
            until_called.enter_context(replaced_method(self._module, "forward", call))
            return self._step(batch)


class StopStep(BaseException):
    """Ends a step at the call of a module, with a result; not an Exception, as the step may catch those."""


@contextlib.contextmanager
def replaced_method(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A context in which a module has another method.

    Example:
        >>> module = torch.nn.Identity()
        >>> with replaced_method(module, "forward", abs):
        ...     module(-1)
        1
        >>> module(-1)
        -1
    """
    attributes = vars(module)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = function
    try:
        yield
    finally:
        attributes.pop(name, None)
        attributes.update(before)

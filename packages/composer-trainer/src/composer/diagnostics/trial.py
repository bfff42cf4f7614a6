"""Run the model outside of the training, and restore what that changes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from composer.core import DataSpec, State
from composer.core.data.elements import Elements, weighted_by
from composer.core.evaluator import enter_training_mode
from composer.core.optimizers import unwrapped
from composer.core.saving.randomness import generator_state, preserve_rng_state, set_generator_state
from composer.functional.modes import kept_modes
from composer.trainer.data.objects import generators_of, has_state, objects_of
from composer.trainer.gradients import split_microbatches
from composer.trainer.optimization import make_scaler

if TYPE_CHECKING:
    from composer.core.step import Microbatch
    from composer.trainer import Trainer


def data_of(trainer: Trainer) -> tuple[State, DataSpec | None]:
    """Return the state of a trainer, and its training data.

    Raises:
        TypeError: It is something else, such as a model.
    """
    if not hasattr(trainer, "state"):
        raise TypeError(f"trainer must be a Trainer, which has the model and its data, got {type(trainer).__name__}.")
    return trainer.state, trainer._data.spec  # noqa: SLF001


@contextlib.contextmanager
def trial(state: State, loader: Any = None, *, steps: bool) -> Iterator[None]:
    """Restore, at the end of the block, what forward passes and steps of optimizers outside of the loop change.

    The restored values are bit-identical. They are the buffers, the gradients and the modes of the model; the batch,
    the outputs and the loss of the state; the global generators, and those that the model and the loader hold; and, if
    the block makes ``steps``, the weights, the optimizers and the loss scale.

    Args:
        state: The run.
        loader: The data loader that the block iterates over.
        steps: Whether the block calls optimizers.
    """
    model = state.model
    found = generators_of(objects_of(loader), {"model": model}).values()
    generators = [(generator, generator_state(generator)) for generator in found]
    tensors = [*(model.parameters() if steps else ()), *model.buffers()]
    copies = [tensor.detach().clone() for tensor in tensors]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    position = copy.deepcopy(loader.state_dict()) if has_state(loader) else None
    fields = {name: getattr(state, name) for name in ("batch", "outputs", "loss", "total_loss", "microbatch", "scaler")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserve_rng_state(state.device))
        stack.enter_context(kept_modes(model))
        for optimizer in map(unwrapped, state.optimizers if steps else ()):
            stack.enter_context(_on_copies(optimizer))
        try:
            # Set aside instead of copied, as gradients take as much memory as the weights.
            for parameter, _ in gradients:
                parameter.grad = None
            if steps:
                state.scaler = make_scaler(state.precision, state.device)
            enter_training_mode(model)
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, copies, strict=True):
                    tensor.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for name, value in fields.items():
                setattr(state, name, value)
            if position is not None:
                loader.load_state_dict(position)
            for generator, drawn in generators:
                set_generator_state(generator, drawn)


@contextlib.contextmanager
def _on_copies(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let an optimizer work on copies of its states and groups, and restore the originals at the end."""
    states, groups = dict(optimizer.state), [dict(group) for group in optimizer.param_groups]
    try:
        for parameter, state in states.items():
            optimizer.state[parameter] = copy.deepcopy(state)
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(states)
        for group, original in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(original)


def weighted_microbatches(
    state: State, spec: DataSpec, microbatch_size: int | None, *, by_tokens: bool = False
) -> Sequence[Microbatch]:
    """Return the microbatches of the state's batch with the weights that they have in a step of one process."""
    elements = Elements(state.model, spec, by_tokens=by_tokens)
    microbatches: Sequence[Microbatch] = split_microbatches(state.batch, spec, microbatch_size, elements.count)
    if elements.is_sum:
        return [(batch, 1.0) for batch, _ in microbatches]
    numbers = elements.on_device(microbatches) if len(microbatches) > 1 else None
    return microbatches if numbers is None else weighted_by(microbatches, numbers)

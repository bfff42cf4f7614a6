"""The weights for evaluation: averages of an optimizer or an algorithm, if there are any.

Evaluation, prediction, saving only the weights and export all use this module.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer.core.model_state import unwrapped
from composer.functional.dtensors import local_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.optim import Optimizer

    from composer.core.state import State

__all__ = ["evaluation_weights", "has_modes", "reshard"]


@contextlib.contextmanager
def evaluation_weights(state: State) -> Iterator[bool]:
    """A context in which the model has its weights for evaluation; on exit it has its training weights again.

    Optimizers with the methods ``train()`` and ``eval()``, such as schedule-free ones, write their averages into the
    model, also if SAM wraps them. The averages of an algorithm such as EMA or SWA replace these. Contexts may be
    nested, and the training weights are restored bit for bit, also after an error.

    Args:
        state: The state with the model, the optimizers and the algorithms.

    Yields:
        Whether the weights may differ from the training weights.

    Example:
        >>> from composer.algorithms import EMA
        >>> from composer.core import Engine, Event, State
        >>> model, ema = torch.nn.Linear(1, 1, bias=False), EMA(half_life=None, smoothing=0.5)
        >>> state = State(model, algorithms=ema)
        >>> engine = Engine(state)
        >>> for weight in (0.0, 1.0):
        ...     _ = torch.nn.init.constant_(model.weight, weight)
        ...     ema.apply(Event.BATCH_END, state, engine.logger)
        >>> with evaluation_weights(state):
        ...     model.weight.item()
        0.5
        >>> model.weight.item()
        1.0
    """
    switching = [one for one in map(unwrapped, state.optimizers) if has_modes(one)]
    with contextlib.ExitStack() as stack:
        for optimizer in filter(_is_in_training_mode, switching):
            stack.enter_context(_averages_of(optimizer, state.model))
        blocks = [block for one in state.algorithms if (block := one.evaluation_weights(state)) is not None]
        for block in blocks:
            stack.enter_context(block)
        yield bool(switching or blocks)


def has_modes(optimizer: Any) -> bool:
    """Return whether an optimizer has separate weights for evaluation.

    Example:
        >>> has_modes(torch.optim.SGD([torch.zeros(1)]))
        False
    """
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def reshard(model: Any) -> None:
    """Shard modules again that hold their complete weights after the forward pass of an evaluation.

    Until then, :func:`torch.distributed.fsdp.fully_shard` computes with the complete weights, even if the shards have
    changed. Other modules are not affected.

    Example:
        >>> reshard(torch.nn.Linear(1, 1))
    """
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        reshard_module = getattr(module, "reshard", None)
        if callable(reshard_module) and callable(getattr(module, "unshard", None)):  # as fully_shard's modules have
            reshard_module()


def _is_in_training_mode(optimizer: Optimizer) -> bool:
    return any(group.get("train_mode", True) for group in optimizer.param_groups)


@contextlib.contextmanager
def _averages_of(optimizer: Any, model: Any) -> Iterator[None]:
    # Copies, because train() computes the weights from the averages, with rounding errors.
    copies = [weight.clone() for weight in _weights(optimizer)]
    try:
        reshard(model)
        optimizer.eval()
        yield
    finally:
        reshard(model)
        optimizer.train()
        with torch.no_grad():
            torch._foreach_copy_(_weights(optimizer), copies)


def _weights(optimizer: Optimizer) -> list[Tensor]:
    """Return the optimizer's weights; of sharded ones (DTensors) the local shards."""
    return local_parts([parameter.detach() for group in optimizer.param_groups for parameter in group["params"]])

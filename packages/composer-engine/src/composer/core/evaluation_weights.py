"""The weights that a model is evaluated with: averages of an optimizer or an algorithm, where there are any.

Evaluation, prediction, saving of weights alone and export all ask this module.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer.core.model_state import unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.optim import Optimizer

    from composer.core.state import State

__all__ = ["evaluation_weights", "has_modes", "reshard"]


@contextlib.contextmanager
def evaluation_weights(state: State) -> Iterator[bool]:
    """Within the block the model has the weights that it is evaluated with; afterwards its training weights again.

    Optimizers with the methods ``train()`` and ``eval()``, such as schedule-free ones, put their averages into the
    model, also where SAM wraps them. The averages of an algorithm such as EMA or SWA come over these. Blocks may be
    nested, and the training weights are restored bit for bit, also after an error.

    Args:
        state: With the model, the optimizers and the algorithms.

    Yields:
        Whether these may be other weights than the training weights.

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
    """Return whether an optimizer has other weights to evaluate with than to train.

    Example:
        >>> has_modes(torch.optim.SGD([torch.zeros(1)]))
        False
    """
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def reshard(model: Any) -> None:
    """Let modules that hold their complete weights after an evaluation's forward pass hold their shards again.

    :func:`torch.distributed.fsdp.fully_shard` computes with these complete weights until then, whatever is written to
    the shards. Other modules stay as they are.

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
    # Copies, as train() computes the weights from the averages, and rounds.
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
    """Return the optimizer's weights, of sharded ones (DTensors) the parts that this process holds."""
    weights = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    return [weight.to_local() if hasattr(weight, "device_mesh") else weight for weight in weights]

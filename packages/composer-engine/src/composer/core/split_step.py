"""Splits the function of a training step into forward pass and loss, and checks that the loss follows its targets."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from composer.core.step import total_of
from composer.functional.nested import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from composer.core.data_spec import Batch
    from composer.core.state import State

__all__ = ["SplitStep", "StopStep", "check_first_loss", "replaced_method"]


def check_first_loss(state: State, host: str) -> None:
    """Let the first loss for targets that algorithms have changed raise, if the forward pass has computed it before.

    Args:
        state: The state, whose functions for outputs and loss are replaced until then.
        host: The name of the host, for the error.
    """
    functions = state.forward, state.loss_function
    forward, loss = state.forward or state.model, state.loss_function or state.model.loss
    seen: Batch = None

    def compute_outputs(batch: Batch) -> Any:
        nonlocal seen
        seen = batch
        return forward(batch)

    def compute_loss(outputs: Any, batch: Batch, **options: Any) -> Any:
        result = loss(outputs, batch, **options)
        if not _is_changed(batch, seen):
            return result
        state.forward, state.loss_function = functions
        if _may_be_in(outputs, result) and torch.equal(total_of(result), total_of(loss(outputs, seen, **options))):
            raise ValueError(
                f"The loss in {host} must be computed from the targets of the batch, which an algorithm has changed "
                "after the forward pass, but it is the loss that the model has computed there, for the former targets. "
                "Compute it from outputs and targets: instead of outputs.loss write cross_entropy(outputs.logits, "
                "batch['labels'])."
            )
        return result

    state.forward, state.loss_function = compute_outputs, compute_loss


def _is_changed(batch: Batch, seen: Batch) -> bool:
    """Return whether algorithms have changed tensors of a batch to other values."""

    def differs(new: Any, old: Any) -> bool:
        if new is old or not (isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor)):
            return False
        if new.is_floating_point() and not old.is_floating_point():
            return bool(((new != 0) & (new != 1)).any())  # otherwise they may be the same classes
        return not torch.equal(new, old)

    return any(map(differs, leaves(batch), leaves(seen)))


def _may_be_in(outputs: Any, loss: Any) -> bool:
    """Return whether a loss depends on a tensor of one number in the outputs, which may be a loss itself."""
    if not isinstance(outputs, (Mapping, list, tuple, torch.Tensor)):
        outputs = getattr(outputs, "__dict__", {})
    losses = {one.grad_fn for one in leaves(outputs) if isinstance(one, torch.Tensor) and one.numel() == 1} - {None}
    found, todo = set[Any](), [total_of(loss).grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [one for one, _ in node.next_functions]
    return not losses.isdisjoint(found)


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

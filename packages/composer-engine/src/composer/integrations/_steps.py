"""The part of a user's loop between a batch and the step of the optimizer, which the loop may split into batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from composer.core import Batch
    from composer.core.adapter import Adapter

__all__ = ["Steps", "call_model"]


class Steps:
    """Calls an adapter in a loop that computes losses and steps the optimizer, and calls nothing after a backward pass.

    Args:
        adapter: The adapter.

    Attributes:
        batches: The number of batches since the last step of the optimizer.
        is_backward_due: Whether a loss was computed whose backward pass is not known to be complete.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._batch: Batch = None
        self._loss: Any = None
        self.batches = 0
        self.is_backward_due = False

    def compute_loss(self, batch: Batch) -> Any:
        """Return the loss of the next batch of the loader."""
        self._batch = self._adapter.begin_batch(batch)
        self.batches += 1
        self.is_backward_due = True
        loss = self._adapter.compute_loss(self._batch)
        self._loss = loss.detach()
        return loss

    def end_backward(self) -> None:
        """Run the events after the backward pass, unless they have run."""
        if self.is_backward_due:
            self.is_backward_due = False
            self._adapter.end_backward()

    def closure(self, optimizer: Optimizer, backward: Callable[[Any], object]) -> Callable[[], Any]:
        """Return a closure for an optimizer that computes a batch several times.

        The loop has computed the batch before; so the first call only returns its loss.

        Args:
            optimizer: The optimizer.
            backward: ``f(loss)``, the backward pass of the loop.

        Raises:
            RuntimeError: The loop has computed several batches, which cannot be computed again.
        """
        if self.batches > 1:
            raise RuntimeError(
                f"{type(optimizer).__name__} computes each batch again, so it cannot accumulate gradients, but there "
                f"were {self.batches} batches before optimizer.step(). Step after each batch."
            )
        is_first = True

        def closure() -> Any:
            nonlocal is_first
            if not is_first:
                optimizer.zero_grad()
                backward(self._adapter.compute_loss(self._batch))
                self._adapter.end_backward()
            is_first = False
            self._adapter.end_gradients()
            return self._loss

        return closure

    def end_step(self) -> None:
        """Run the events after the step of the optimizer."""
        self.batches = 0
        self._adapter.end_step()

    def reset(self) -> None:
        """Forget an incomplete step, after a state has been loaded."""
        self.batches, self.is_backward_due = 0, False


def call_model(model: Callable[..., Any], batch: Batch) -> Any:
    """Call a model with a batch: with keyword arguments, with the first item of a tuple or list, or with all of it.

    Example:
        >>> call_model(abs, (-1, "label"))
        1
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)

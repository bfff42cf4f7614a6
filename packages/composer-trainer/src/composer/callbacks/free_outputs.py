"""Let go of a model's outputs as soon as nobody needs them."""

from __future__ import annotations

from composer.core import Callback, Logger, State

__all__ = ["FreeOutputs"]


class FreeOutputs(Callback):
    """Drop the outputs once the loss is known, so that their memory can be used by the backward pass.

    With training metrics, which are computed from the outputs after the backward pass, they are dropped after the
    batch instead. Callbacks that look at outputs, such as a logger of predictions, find None from then on.

    Example:
        >>> from composer.core import Engine
        >>> state = State(model=None, callbacks=FreeOutputs())
        >>> state.outputs = "large"
        >>> Engine(state).run_event("after_loss")
        >>> print(state.outputs)
        None
    """

    def after_loss(self, state: State, logger: Logger) -> None:
        """Drop the outputs, unless metrics are to be computed from them."""
        del logger
        if not state.train_metrics:
            state.outputs = None

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Drop the outputs."""
        del logger
        state.outputs = None

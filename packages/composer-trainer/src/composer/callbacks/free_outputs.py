"""Release a model's outputs as early as possible."""

from __future__ import annotations

from composer.core import Callback, Logger, State


class FreeOutputs(Callback):
    """Release the outputs after the loss, so that the backward pass can use their memory.

    With training metrics, which are computed from the outputs after the backward pass, they are released after the
    batch instead. Callbacks that read the outputs later, such as a logger of predictions, get None.

    Example:
        >>> from composer.core import Engine
        >>> state = State(model=None, callbacks=FreeOutputs())
        >>> state.outputs = "large"
        >>> Engine(state).run_event("after_loss")
        >>> print(state.outputs)
        None
    """

    def after_loss(self, state: State, logger: Logger) -> None:
        """Release the outputs, unless there are training metrics."""
        if not state.train_metrics:
            state.outputs = None

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Release the outputs."""
        state.outputs = None

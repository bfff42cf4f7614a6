"""A model for use elsewhere, at the end of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from composer.core import Callback, Logger, State, evaluation_weights
from composer.core.checks import one_of, to_path
from composer.core.data_spec import move_batch
from composer.core.naming import fill_in
from composer.export import export_for_inference

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from torch import nn

__all__ = ["ExportForInferenceCallback"]


def _to_save_path(given: str | os.PathLike[str]) -> str:
    return to_path("save_path", given)


@attrs.define(eq=False)
class ExportForInferenceCallback(Callback):
    """Export the model at the end of a training; see :func:`composer.export.export_for_inference`.

    What is exported are the weights that the model is evaluated with: those of EMA or SWA, where a run has them. In a
    distributed run the first process exports.

    Args:
        save_format: ``"torchexport"`` or ``"onnx"``.
        save_path: The file, or a URL that fsspec knows. ``{run_name}`` is filled in.
        sample_input: A batch as the model takes it. By default the first batch that was evaluated on, or, where there
            was no evaluation, the last one of training, as algorithms have left it.
        transforms: Functions that change a copy of the model before it is exported.
        input_names: What the inputs are called.
        output_names: What the outputs are called.

    Raises:
        ValueError: There is no such format, or ``save_path`` has something else in braces.

    Example:
        >>> ExportForInferenceCallback("torchexport", "runs/{run_name}/model.pt2").save_path
        'runs/{run_name}/model.pt2'
    """

    save_format: str = attrs.field(validator=one_of("torchexport", "onnx"))
    save_path: str = attrs.field(converter=_to_save_path)
    sample_input: Any = attrs.field(default=None, repr=False)
    transforms: Callable[[nn.Module], nn.Module | None] | Sequence[Callable[[nn.Module], nn.Module | None]] | None = (
        None
    )
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None

    _seen: Any = attrs.field(default=None, init=False, repr=False)

    @save_path.validator
    def _check_save_path(self, _: object, save_path: str) -> None:
        fill_in(save_path, {"run_name": "run"}, "save_path")

    def init(self, state: State, logger: Logger) -> None:
        """Forget the batch of an earlier run."""
        del state, logger
        self._seen = None

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """Remember the first batch that is evaluated on: it is of the size that the model is used with."""
        del logger
        if self._seen is None and self.sample_input is None:
            self._seen = move_batch(state.batch, torch.device("cpu"))

    def fit_end(self, state: State, logger: Logger) -> None:
        """Export."""
        del logger
        if state.rank != 0:
            return
        given = self._seen if self.sample_input is None else self.sample_input
        with evaluation_weights(state):
            export_for_inference(
                state.model,
                self.save_format,
                fill_in(self.save_path, {"run_name": state.run_name}, "save_path"),
                sample_input=state.batch if given is None else given,
                transforms=self.transforms,
                input_names=self.input_names,
                output_names=self.output_names,
            )

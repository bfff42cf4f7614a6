"""Export the model at the end of a training."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import nn

from composer.callbacks._exporting import is_interrupted
from composer.core import Callback, Logger, State, evaluation_weights
from composer.core.checks import one_of, to_path
from composer.core.data.batches import move_batch
from composer.core.files import check_template, fill_in_run
from composer.core.saving.components import transient
from composer.distributed.collectives import failing_in_all_processes
from composer.export.inference import check_not_sharded, export_for_inference, without_labels
from composer.loggers.products import require_product


def _to_save_path(given: str | os.PathLike[str]) -> str:
    return check_template(to_path("save_path", given), "save_path", ["run_name"])


@attrs.define(eq=False)
class ExportForInferenceCallback(Callback):
    """Export the model at the end of a training; see :func:`composer.export.export_for_inference`.

    The exported weights are those used for evaluation, such as the averages of EMA or SWA. In a distributed run the
    process of rank 0 exports, and an error there is raised in all processes. A model that FSDP2 shards raises an error
    before the first batch: save checkpoints, and export in a second program, of one process.

    Args:
        save_format: ``"torchexport"`` or ``"onnx"``.
        save_path: Path of the file, or a URL for fsspec. ``{run_name}`` is filled in.
        sample_input: A batch in the form that the model takes. Defaults to the first evaluated batch or, without
            evaluation, to the last training batch after all algorithms. It has no labels for a model of
            Transformers that is not an encoder and decoder.
        transforms: Functions that change a copy of the model before it is exported.
        input_names: Names of the inputs.
        output_names: Names of the outputs.

    Raises:
        ModuleNotFoundError: The format is ``"onnx"``, and onnx or onnxscript is not installed.
        ValueError: The format does not exist, or ``save_path`` contains another field in braces.

    Example:
        >>> ExportForInferenceCallback("torchexport", "runs/{run_name}/model.pt2").save_path
        'runs/{run_name}/model.pt2'
    """

    saves_model: ClassVar = True
    """Whether ``fast_dev_run`` leaves the callback out."""

    save_format: str = attrs.field(validator=one_of("torchexport", "onnx"))
    save_path: str = attrs.field(converter=_to_save_path)
    sample_input: Any = attrs.field(default=None, repr=False, kw_only=True)
    transforms: Callable[[nn.Module], nn.Module | None] | Sequence[Callable[[nn.Module], nn.Module | None]] | None = (
        attrs.field(default=None, kw_only=True)
    )
    input_names: Sequence[str] | None = attrs.field(default=None, kw_only=True)
    output_names: Sequence[str] | None = attrs.field(default=None, kw_only=True)

    _seen: Any = transient(default=None)

    def __attrs_post_init__(self) -> None:
        """Check that the packages of the format are installed, which the export needs after the training."""
        for package in ("onnx", "onnxscript") if self.save_format == "onnx" else ():
            require_product(package, "onnx")

    def init(self, state: State, logger: Logger) -> None:
        """Reset the state of an earlier run."""
        self._seen = None

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Raise an error before the first batch if the model, which is sharded after ``fit_start``, cannot be exported.

        Raises:
            ValueError: The model is sharded over processes.
        """
        check_not_sharded(state.model)

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """Keep the first evaluated batch, which has the size that the model is used with."""
        if self._seen is None and self.sample_input is None:
            self._seen = without_labels(state.model, move_batch(state.batch, torch.device("cpu")))

    def fit_end(self, state: State, logger: Logger) -> None:
        """Export, unless a signal has stopped the training."""
        if is_interrupted(state, "ExportForInferenceCallback"):
            return
        with failing_in_all_processes("Exporting the model"):
            if state.rank == 0:
                self._export(state)

    def _export(self, state: State) -> None:
        given = self._seen if self.sample_input is None else self.sample_input
        with evaluation_weights(state):
            export_for_inference(
                state.model,
                self.save_format,
                fill_in_run(self.save_path, state, "save_path", ["run_name"]),
                sample_input=without_labels(state.model, state.batch) if given is None else given,
                transforms=self.transforms,
                input_names=self.input_names,
                output_names=self.output_names,
            )

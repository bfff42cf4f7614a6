"""The layers of a model, with their shapes and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from composer.core import DataSpec, Event, State, get_precision_context
from composer.core.data.batches import move_batch, note_batch
from composer.diagnostics.trial import data_of, trial
from composer.functional.checks import check_whole
from composer.functional.dtensors import is_sharded
from composer.loggers.products import import_product
from composer.trainer.data.batches import first_batch
from composer.trainer.gradients import split_microbatches

if TYPE_CHECKING:
    from composer.trainer import Trainer


def summary(trainer: Trainer, sample_input: Any = None, *, max_depth: int = 3) -> Any:
    """Compute one batch, and return the layers, their shapes and parameters as a table of torchinfo.

    No algorithm runs at its events. The model and all generators are left as they were, bit for bit.

    Args:
        trainer: The trainer, before ``fit`` if that shards the model.
        sample_input: A batch as the model's ``forward`` takes it; the first microbatch to train on if None.
        max_depth: How many levels of modules are listed below the model.

    Returns:
        A ``torchinfo.ModelStatistics``, which prints as a table.

    Raises:
        TypeError: ``trainer`` is something else, such as a model.
        ModuleNotFoundError: torchinfo is not installed.
        ValueError: There is no batch, or the model is sharded, as by ``parallelism_config={"fsdp": {}}`` in a fit.

    Example:
        >>> import torch
        >>> from composer import Trainer
        >>> from composer.models import ComposerClassifier
        >>> model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = Trainer(model=model, optimizers=optimizer, device="cpu", progress_bar=False)
        >>> summary(trainer, (torch.rand(8, 4), torch.zeros(8, dtype=torch.long))).total_params
        10
    """
    state, spec = data_of(trainer)
    torchinfo = import_product("torchinfo", "summary")
    check_whole("max_depth", max_depth, 0, "It counts the levels of modules below the model.")
    model = state.model
    if is_sharded(model):
        raise ValueError(
            "A model that is sharded over processes cannot be summarized, as each process has only a part of it. Call "
            "summary(trainer) before fit(), or without parallelism_config."
        )
    loader = None if spec is None else spec.dataloader
    with trial(state, loader, steps=False), get_precision_context(state.precision, state.device.type):
        batch = first_microbatch(state, spec, sample_input)
        columns = ("input_size", "output_size", "num_params", "trainable")
        shown = {"depth": max_depth, "col_names": columns, "row_settings": ("var_names",), "verbose": 0}
        try:
            return torchinfo.summary(model, input_data=[batch], cache_forward_pass=False, **shown)
        except RuntimeError as error:
            note_batch(error, Event.BEFORE_FORWARD, model, ".forward", batch)
            raise


def first_microbatch(state: State, spec: DataSpec | None, sample_input: Any) -> Any:
    """Return the first microbatch of the data, or the sample input, on the state's device."""
    if sample_input is not None:
        return move_batch(sample_input, state.device)
    if spec is None or isinstance(spec.dataloader, Iterator):
        raise ValueError(
            "There is no batch to compute: give sample_input, or a train_dataloader that can be iterated over again."
        )
    batch = first_batch(state, spec, "train_dataloader")
    return split_microbatches(batch, spec, state.device_train_microbatch_size)[0][0]

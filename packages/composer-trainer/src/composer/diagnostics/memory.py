"""The memory of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from composer.core import DataSpec, Precision, State, get_precision_context
from composer.core.optimizers import unwrapped
from composer.diagnostics.layers import first_microbatch
from composer.diagnostics.learning_rate import train_step
from composer.diagnostics.trial import data_of, trial
from composer.functional.checks import check_whole
from composer.functional.dtensors import is_sharded
from composer.functional.nested import leaves
from composer.trainer.gradients import split_microbatches
from composer.trainer.optimization import Optimization

if TYPE_CHECKING:
    from composer.trainer import Trainer


def estimate_memory(
    trainer: Trainer,
    batch_size: int | None = None,
    precision: str | Precision | None = None,
    *,
    sample_input: Any = None,
) -> dict[str, int]:
    """Return the bytes that a step needs: of weights, gradients, optimizer state, buffers, batch and activations.

    It computes the losses of two batches, and trains one step, after which everything is restored bit for bit. The
    total is that of all parts at once: what an operation needs while it runs comes on top.

    Args:
        trainer: The trainer, before ``fit``.
        batch_size: The samples of a microbatch; those of the batch if None. Activations of more samples than the batch
            has are extrapolated linearly.
        precision: The precision; the trainer's if None.
        sample_input: A batch as the model's ``forward`` takes it; the first microbatch to train on if None.

    Returns:
        The bytes of ``"parameters"``, ``"gradients"``, ``"optimizer state"``, ``"buffers"``, ``"batch"`` and
        ``"activations"`` (what is stored for the backward pass), and their sum, ``"total"``.

    Raises:
        TypeError: ``trainer`` is something else, such as a model.
        ValueError: A value is out of range, there is no batch, or the model is sharded.

    Example:
        >>> from composer import Trainer
        >>> from composer.models import ComposerClassifier
        >>> model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> trainer = Trainer(model=model, optimizers=optimizer, device="cpu", progress_bar=False)
        >>> memory = estimate_memory(trainer, 64, sample_input=(torch.rand(8, 4), torch.zeros(8, dtype=torch.long)))
        >>> memory["parameters"], memory["optimizer state"], memory["batch"]
        (40, 40, 1536)
    """
    state, spec = data_of(trainer)
    if batch_size is not None:
        check_whole("batch_size", batch_size, 1, "It counts samples.")
    if is_sharded(state.model):
        raise ValueError("estimate_memory must be called before fit(), which shards the model over processes.")
    former = state.precision
    with trial(state, None if spec is None else spec.dataloader, steps=True):
        state.precision = former if precision is None else Precision(precision)
        try:
            batch = first_microbatch(state, spec, sample_input)
            spec = spec or DataSpec([batch])
            samples = int(spec.get_num_samples_in_batch(batch))
            wanted = batch_size or samples
            # Activations grow by the same number of bytes for each sample.
            few, more = min(samples, wanted), min(samples, wanted, max(2, min(samples, wanted) // 2))
            first, second = (split_microbatches(batch, spec, size)[0][0] for size in (few, more))
            stored = [_stored(state, one) for one in (first, second)]
            each = (stored[0] - stored[1]) / (few - more) if few > more else stored[0] / few
            state.batch = second
            train_step(state, spec, Optimization(state, torch.zeros((), dtype=torch.int64, device=state.device)))
            of_batch = _bytes(_tensors(first)) * wanted // few
            parts = _memory(state, of_batch, round(stored[0] + each * (wanted - few)))
        finally:
            state.precision = former
    return {**parts, "total": sum(parts.values())}


def _stored(state: State, batch: Any) -> int:
    """Return the bytes that are stored for the backward pass of the loss of a batch.

    The method is called and not the module, as a compiled module would not call the hooks.
    """
    own = {_storage(tensor) for tensor in (*state.model.parameters(), *state.model.buffers(), *_tensors(batch))}
    stored: dict[int, int] = {}

    def store(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in own:
            stored[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(store, lambda tensor: tensor), get_precision_context(state.precision, state.device.type):
        loss = state.model.loss(state.model.forward(batch), batch)
        del loss  # until here its graph keeps the tensors, so that each has a storage of its own
    return sum(stored.values())


def _memory(state: State, of_batch: int, of_activations: int) -> dict[str, int]:
    """Return the bytes of each part."""
    model = state.model
    states = [tensor for one in state.optimizers for tensor in _tensors([*unwrapped(one).state.values()])]
    return {
        "parameters": _bytes(model.parameters()),
        "gradients": _bytes(one for one in model.parameters() if one.requires_grad),
        "optimizer state": _bytes(states),
        "buffers": _bytes(model.buffers()),
        "batch": of_batch,
        "activations": of_activations,
    }


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(nested) if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)

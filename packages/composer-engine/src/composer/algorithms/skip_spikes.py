"""SkipSpikes: skip the steps of batches with a spike of the loss or the gradients."""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from composer import functional as cf
from composer.algorithms._idle import warn_at_end
from composer.core import Algorithm, BatchKey, Event, Logger, Precision, Stage, State, saved
from composer.core.checks import integer, number_between, one_of
from composer.core.declarations import owned
from composer.core.optimizers import unwrapped
from composer.core.saving.components import reset_fields, transient
from composer.core.step import total_of
from composer.functional.dtensors import local_parts, rank_and_processes
from composer.functional.training.gradient_clipping import list_gradients, measure_norm, scale

_log = logging.getLogger(__name__)

_NAMED = 32  # spikes, of which the batch and its samples are stored
_OF_SCHEDULES = frozenset({"params", "lr", "initial_lr", "scheduled_lr"})  # settings that a step does not change
_NESTED = (Tensor, list, tuple, dict)


def _to_deviations(given: str | float) -> Any:
    if not isinstance(given, str):
        return given
    with contextlib.suppress(ValueError):
        if given.endswith("std"):
            return float(given.removesuffix("std"))
    raise ValueError(f"threshold must be a number of standard deviations such as '6std', got {given!r}.")


@attrs.define(eq=False)
class SkipSpikes(Algorithm):
    """Skip the step of a batch whose loss or gradient norm is far above those before it (arXiv:2504.02507).

    See :func:`composer.functional.detect_spikes`. A skipped step leaves weights and the state of the optimizers as they
    were, bit for bit. No step waits for the device: the decision, the same in all processes, stays there.

    Optimizers with ``fused=True`` skip the step themselves. Those of other optimizers are undone from copies of the
    weights and the state, which exist during the step only. With loss scaling and automatic microbatching in several
    processes, steps of fused optimizers are undone, too.

    Args:
        threshold: The number of standard deviations above the mean, ``"6std"`` or a number.
        window: The number of batches before, at least 4. Finite values are compared once half of them have been seen.
        action: ``"skip"``, or ``"clip"``, which limits gradients with a norm above the limit to it instead; the loss is
            then ignored.
        index_key: The key of the samples' indices in a batch, which are then reported with its number.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is out of range. In a step: the optimizer has state that cannot be restored without waiting
            for the device, such as AdamW's on a GPU without ``fused=True`` or ``capturable=True``.

    Example:
        >>> SkipSpikes(window=64)
        SkipSpikes(threshold=6.0, window=64, action='skip', index_key=None)
    """

    threshold: float = attrs.field(
        default="6std",  # type: ignore[assignment]  # mypy overlooks the converter
        converter=_to_deviations,
        validator=number_between(0, above=True, meaning="It is a number of standard deviations, such as '6std'."),
    )
    window: int = integer(128, 4, meaning="It is a number of batches.")
    action: str = attrs.field(default="skip", validator=one_of("skip", "clip"))
    index_key: BatchKey | None = None

    _history: Tensor | None = saved(default=None)  # the last values of the loss, if it counts, and of the norm
    _num_batches: int = saved(default=0)
    _num_spikes: Tensor | None = saved(default=None)
    _spikes: Tensor | None = saved(default=None)  # the last ones: the batch, then the indices of its samples
    _num_reported: int = saved(default=0)  # batches

    _values: Tensor | None = transient(default=None)
    _decision: tuple[Tensor, Tensor] | None = transient(default=None)
    _place: Tensor | None = transient(default=None)  # a row of _spikes
    _before: _Snapshot | None = transient(default=None)

    # SELECT, so that the norm is that before GradientClipping.
    runs_at: ClassVar = {
        Event.FIT_START: Stage.GRADIENT,
        Event.AFTER_TRAIN_BATCH: Stage.SELECT,
        Event.BATCH_END: Stage.GRADIENT,
        Event.EPOCH_END: Stage.GRADIENT,
        Event.FIT_END: Stage.GRADIENT,
    }
    reads: ClassVar = {"optimizers", "loss", "batch", "timestamp"}
    writes: ClassVar = {"model", "optimizers", "gradients"}
    owns: ClassVar = owned(
        "the optimizers' step", "A step that SAM computes twice cannot be undone: use GradientClipping."
    )

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Measure the batch before the step; undo the step after it; report at the end of an epoch."""
        if event is Event.FIT_START:
            if not state.timestamp.counts.batch:
                reset_fields(self)
        elif event is Event.AFTER_TRAIN_BATCH:
            self._measure(state)
        elif event is Event.BATCH_END:
            if self._values is not None:
                self._finish(state, logger)
        else:
            self._report(int(state.timestamp.counts.batch))
            if event is Event.FIT_END and 0 < self._num_batches <= self._num_before:
                warn_at_end(
                    state,
                    f"SkipSpikes compared none of the {self._num_batches} batches, as it compares from batch "
                    f"{self._num_before + 1} on with window={self.window}; only values that are not finite were "
                    "spikes. Choose a smaller window for a training of this length.",
                    _log.warning,
                )

    @torch.no_grad()
    def _measure(self, state: State) -> None:
        """Measure loss and gradients, and decide already, or copy what the step changes."""
        optimizers = [unwrapped(optimizer) for optimizer in state.optimizers]
        gradients = list_gradients([weight for optimizer in optimizers for weight in _trained(optimizer)])
        loss = state.total_loss if state.total_loss is not None else total_of(state.loss)
        norm = measure_norm(gradients).to(loss.device)
        self._place = self._name(state, loss.device)
        self._decision = self._before = None
        if self.action == "clip":
            self._values = norm.float().reshape(1)
            self._decision = spikes, limits = self._detect(self._values)
            scale(gradients, torch.where(spikes[0], limits[0] / norm, 1.0))
            return
        self._values = torch.stack([loss.detach().float().reshape(()), norm.float()])
        if not _can_decide_first(state, optimizers):
            self._before = _Snapshot.of(optimizers)
            return
        self._values = _mean_over_processes(self._values)
        self._decision = spikes, _ = self._detect(self._values)
        for optimizer in optimizers:
            # The attribute by which GradScaler makes fused optimizers skip their step.
            optimizer.found_inf = spikes.any().float()  # type: ignore[attr-defined]

    @torch.no_grad()
    def _finish(self, state: State, logger: Logger) -> None:
        """Undo the step of a spike, and store the values."""
        values, self._values = self._values, None
        assert values is not None
        if self._decision is None:
            values = _mean_over_processes(values)
            self._decision = self._detect(values)
        elif self.action == "skip":
            _release([unwrapped(optimizer) for optimizer in state.optimizers])
        spikes, limits = self._decision
        is_spike = spikes.any()
        if self._before is not None:
            is_spike = self._before.restore(is_spike)
        assert self._history is not None
        kept = values.minimum(limits)
        self._history[:, self._num_batches % self.window] = torch.where(kept.isfinite(), kept, torch.nan)
        self._num_batches += 1
        self._count(is_spike)
        self._decision = self._place = self._before = None
        if logger.is_heard:
            logger.log_metrics({"spikes/count": self._num_spikes, "spikes/gradient_norm": values[-1]})

    def _detect(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return which values are spikes, and the limits."""
        shape = (len(values), self.window)
        if self._history is None or self._history.shape != shape:  # another window than in the saved run
            self._history, self._num_batches = torch.full(shape, torch.nan, device=values.device), 0
        self._history = self._history.to(values.device)
        return cf.detect_spikes(values, self._history, self.threshold, self._num_before)

    @property
    def _num_before(self) -> int:
        """The number of batches with which a value is compared at least."""
        return max(2, self.window // 2)

    def _name(self, state: State, device: torch.device) -> Tensor:
        """Return the number of the batch, followed by the indices of its samples if they are known."""
        number = torch.full((1,), int(state.timestamp.counts.batch), device=device)
        if self.index_key is None:
            return number
        indices = state.batch_get_item(self.index_key)
        if not isinstance(indices, Tensor):
            raise TypeError(f"index_key={self.index_key!r} must be the key of a tensor, got {type(indices).__name__}.")
        return torch.cat([number, indices.reshape(-1).to(device, torch.int64)])

    def _count(self, is_spike: Tensor) -> None:
        """Count a spike, and store its batch and samples."""
        place, device = self._place, is_spike.device
        assert place is not None
        if self._num_spikes is None or self._spikes is None:
            self._num_spikes = torch.zeros((), dtype=torch.int64, device=device)
            self._spikes = torch.full((_NAMED, len(place)), -1, device=device)
        self._num_spikes, spikes = self._num_spikes.to(device) + is_spike, self._spikes.to(device)
        # Batches may differ in size: the first one sets the number of indices.
        row = torch.nn.functional.pad(place, (0, max(0, spikes.shape[1] - len(place))), value=-1)[: spikes.shape[1]]
        self._spikes = torch.where(is_spike, torch.cat([spikes[1:], row.unsqueeze(0)]), spikes)

    def _report(self, num_batches: int) -> None:
        """Log the spikes since the last report; it reads them from the device, so not in a step."""
        rows = [] if self._spikes is None else self._spikes.tolist()
        for batch, *indices in rows:
            if batch >= self._num_reported:
                known = [index for index in indices if index >= 0]
                samples = f" with the samples {', '.join(map(str, known))}" if known else ""
                done = "skipped its step" if self.action == "skip" else "clipped its gradients"
                _log.warning("Batch %d%s was a spike: SkipSpikes has %s.", batch, samples, done)
        self._num_reported = num_batches


@attrs.frozen
class _Snapshot:
    """What a step of optimizers changes, and its copies."""

    optimizers: Sequence[Optimizer]
    weights: list[list[Tensor]]
    copies: list[Tensor]
    numbers: dict[tuple[str, str, int, int], float]

    @classmethod
    def of(cls, optimizers: Sequence[Optimizer]) -> _Snapshot:
        """Copy the weights that have gradients, and their state."""
        weights = [_trained(optimizer) for optimizer in optimizers]
        tensors, numbers = _changed(optimizers, weights)
        copies = [torch.empty_like(tensor) for tensor in tensors]
        if tensors:
            torch._foreach_copy_(copies, tensors)
        return cls(optimizers, weights, copies, numbers)

    def restore(self, is_wanted: Tensor) -> Tensor:
        """Undo the step where ``is_wanted``, a tensor, is true; return whether it was undone.

        The step in which an optimizer has created the state of a weight is not undone.

        Raises:
            ValueError: The step has changed a number on the host.
        """
        # Again, as an optimizer may replace the tensors of its state.
        tensors, numbers = _changed(self.optimizers, self.weights)
        # Of the step that creates the state, there were no numbers before.
        for key, number in numbers.items():
            if self.numbers.get(key, number) != number:
                raise _cannot_undo(*key[:2])
        if [tensor.shape for tensor in tensors] != [copy.shape for copy in self.copies]:
            return torch.zeros_like(is_wanted)
        for tensor, copy in zip(tensors, self.copies, strict=True):  # torch has no such function for lists
            torch.where(is_wanted.to(tensor.device), copy, tensor, out=tensor)
        return is_wanted


def _trained(optimizer: Optimizer) -> list[Tensor]:
    """Return the weights that a step changes."""
    return [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]


def _changed(
    optimizers: Sequence[Optimizer], weights: list[list[Tensor]]
) -> tuple[list[Tensor], dict[tuple[str, str, int, int], float]]:
    """Return this process's parts of weights, and of the tensors in their states and in groups on their device.

    The numbers of the states are second, by the names of the optimizer and their own, the weight and a place.
    """
    found: list[Tensor] = []
    numbers: dict[tuple[str, str, int, int], float] = {}
    for optimizer, trained in zip(optimizers, weights, strict=True):
        for weight in trained:
            found += (weight, *_state_of(optimizer, weight, numbers))
        devices = {weight.device for weight in trained}
        for group in optimizer.param_groups:
            held = [value for name, value in group.items() if name not in _OF_SCHEDULES and isinstance(value, _NESTED)]
            found += [one for one in tree_leaves(held) if isinstance(one, Tensor) and one.device in devices]
    return [part for one in local_parts(found) for part in _parts_of(one)], numbers


def _parts_of(tensor: Any) -> list[Tensor]:
    """Return the tensors of a quantized one, which has few operations of its own; or the tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in _parts_of(getattr(tensor, name))]


def _state_of(optimizer: Optimizer, weight: Tensor, numbers: dict[tuple[str, str, int, int], float]) -> list[Tensor]:
    """Return the state of a weight, tensors on its device, and add the numbers, which a step must not change."""
    found = []
    for name, value in optimizer.state.get(weight, {}).items():
        for place, leaf in enumerate((value,) if isinstance(value, Tensor) else tree_leaves(value)):
            if isinstance(leaf, Tensor) and leaf.device == weight.device:
                found.append(leaf)
            elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
                numbers[type(optimizer).__name__, name, id(weight), place] = leaf
            elif not isinstance(leaf, (str, bool, torch.dtype, torch.device, types.NoneType)):
                raise _cannot_undo(type(optimizer).__name__, name)
    return found


def _cannot_undo(optimizer: str, field: str) -> ValueError:
    return ValueError(
        f"SkipSpikes cannot undo a step of {optimizer} without waiting for the device: {field!r} in its state is on "
        "the host. Pass fused=True or capturable=True to an optimizer of torch, or set action='clip'."
    )


def _can_decide_first(state: State, optimizers: Sequence[Optimizer]) -> bool:
    """Return whether all optimizers skip a step that is decided before it."""
    # A loss scaler sets the same attribute. Automatic microbatching computes gradients in one process alone.
    is_free = state.precision is not Precision.AMP_FP16 and not state.auto_microbatching
    return is_free and all(getattr(one, "_step_supports_amp_scaling", False) for one in optimizers)


def _release(optimizers: Sequence[Optimizer]) -> None:
    """Remove what has made the optimizers skip their step.

    Raises:
        RuntimeError: A loss scaler of the host has replaced it.
    """
    for optimizer in optimizers:
        if vars(optimizer).pop("found_inf", None) is None:
            raise RuntimeError(
                f"SkipSpikes could not skip steps of {type(optimizer).__name__}, because a GradScaler of the training "
                "loop decides on them. Use bf16, or the optimizer without fused=True."
            )


def _mean_over_processes(values: Tensor) -> Tensor:
    """Return the means over all processes, on the device."""
    _, num_processes = rank_and_processes()
    if num_processes == 1:
        return values
    torch.distributed.all_reduce(values)
    return values / num_processes

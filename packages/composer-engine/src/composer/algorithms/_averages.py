"""The base of EMA and SWA: averaged weights that replace the training weights during evaluation."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from composer.algorithms._idle import warn_at_end
from composer.core import Algorithm, Event, Stage, State, Time, TimeUnit
from composer.core.checks import caller_level
from composer.core.declarations import owned
from composer.core.evaluator import has_modes
from composer.core.optimizers import unwrapped
from composer.core.saving.components import read_state
from composer.core.saving.model_state import bare_model, bare_name
from composer.core.saving.records import read
from composer.functional import update_averages
from composer.functional.checks import few
from composer.functional.dtensors import is_dtensor, local_parts, reshard, shard_like
from composer.functional.training.ema import average_dtype, is_dense, is_statistic, tensor_slots

_Slot = tuple[dict[str, Tensor], str]
"""The dictionary of a module, and the key, of a parameter or buffer."""

_SWAP_IN = frozenset({Event.EVAL_START, Event.PREDICT_START})
_SWAP_OUT = {Event.EVAL_END: Event.EVAL_START, Event.PREDICT_END: Event.PREDICT_START}

# What an algorithm saves of the weights; the third are averages in float32 of which the model has rounded copies.
_KINDS = ("averaged_weights", "training_weights", "exact_averages")

SWAPS = frozenset({*_SWAP_IN, *_SWAP_OUT})
"""The events at which averaged and training weights are exchanged."""


def to_time(value: Time | str | int, name: str) -> Time:
    """Return a time; an int is a number of batches. Errors contain the name of the setting."""
    return Time.from_input(value, TimeUnit.BATCH, name=name)


def to_moment(value: Time | str | int, name: str) -> Time:
    """Return a time within the training."""
    moment = to_time(value, name)
    if moment.value < 0 or (moment.unit is TimeUnit.DURATION and moment.value > 1):
        raise ValueError(f"{name} must be within the training, got {moment}: e.g. '10ep', '0.7dur'.")
    return moment


def to_interval(value: Time | str | int, name: str) -> Time:
    """Return an interval at the end of batches or epochs."""
    every = to_time(value, name)
    if every.unit not in {TimeUnit.BATCH, TimeUnit.EPOCH} or every.value < 1:
        raise ValueError(f"{name} must be at least one batch or epoch, got {every}.")
    return every


def to_update_interval(value: Time | str | int) -> Time:
    """Return ``update_interval`` as a time."""
    return to_interval(value, "update_interval")


def has_passed(every: Time, event: Event, state: State) -> bool:
    """Return whether an interval has passed at the end of a batch or an epoch."""
    counts_here = event is (Event.BATCH_END if every.unit is TimeUnit.BATCH else Event.EPOCH_END)
    return counts_here and not state.timestamp.count(every.unit) % every.value


class WeightAveraging(Algorithm):
    """Base of algorithms with averaged weights, which are in the model during evaluations and predictions."""

    acted = 0
    update_interval: Time | None
    _averages: AveragedWeights

    runs_at: ClassVar = dict.fromkeys(
        (Event.FIT_START, Event.BATCH_END, Event.EPOCH_END, Event.FIT_END, *sorted(SWAPS)), Stage.WEIGHTS
    )
    owns: ClassVar = owned(
        "the weights used for evaluation",
        "Use one average for evaluation: that of the entire training (EMA) or of its last part (SWA).",
    )

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return the events at which it runs: updates are at the end of batches or of epochs."""
        assert self.update_interval is not None
        unused = Event.EPOCH_END if self.update_interval.unit is TimeUnit.BATCH else Event.BATCH_END
        return {event: stage for event, stage in WeightAveraging.runs_at.items() if event is not unused}

    def is_update_due(self, event: Event, state: State) -> bool:
        """Return whether the interval of updates has passed at the end of a batch or an epoch."""
        assert self.update_interval is not None
        return has_passed(self.update_interval, event, state)

    def evaluation_weights(self, state: State) -> AbstractContextManager[None] | None:
        """Return a context in which the model has the averages; None if there are none."""
        return self._averages.in_model(state.model)

    def restore(self, state: State) -> None:
        """Restore the training weights."""
        self._averages.restore()

    def begin_again(self) -> None:
        """Discard the averages, as the model has got other weights."""
        self._averages = AveragedWeights(self._averages.owner)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, and the averages, or while these are in the model, the training weights."""
        return {**super().state_dict(), **self._averages.state_dict()}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Check that ``state`` is a result of :meth:`state_dict`.

        Raises:
            ValueError: A key is missing or unknown, or a value is of another type.
        """
        self._read(state)

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        """Load the result of :meth:`state_dict`; it must match, whatever ``strict`` is."""
        progress, weights = self._read(state)
        for name, value in progress.items():
            setattr(self, name, value)
        self._averages.load_state_dict(weights)

    def _read(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values of the saved fields, and the weights of a state."""
        weights: dict[str, Any] = {name: state[name] for name in _KINDS if name in state}
        if weights.keys() >= {"averaged_weights", "training_weights"}:
            raise ValueError(f"{type(self).__name__} saves either averaged_weights or training_weights, got both.")
        for name, value in weights.items():
            read(value, dict[str, Tensor], f"{type(self).__name__}.{name}")
        return read_state(self, {name: value for name, value in state.items() if name not in weights}), weights


@attrs.define(eq=False)
class AveragedWeights:
    """Averages of a model's parameters and running statistics, with copies of its other buffers.

    A parameter without ``requires_grad`` has no average until it is trained: the model's own value is used.

    Args:
        owner: The name of the algorithm's class, for errors.
    """

    owner: str
    _model: nn.Module | None = attrs.field(default=None, init=False)
    # The weights outside the model: the averages, or while these are in the model, the training weights.
    _outside: dict[str, Tensor] = attrs.field(factory=dict, init=False)
    # While rounded averages are in the model, those in float32 of weights in float16 and bfloat16.
    _exact: dict[str, Tensor] = attrs.field(factory=dict, init=False)
    # The dictionaries of the modules, not the tensors: modules may assign a new one, `self.mean = 0.9 * self.mean`.
    _slots: dict[str, _Slot] = attrs.field(factory=dict, init=False)
    # The names of weights that are averaged, and of those that are copied in place: the other buffers of real numbers.
    _averaged: list[str] = attrs.field(factory=list, init=False)
    held: list[str] = attrs.field(factory=list, init=False)
    # The names of weights that are replaced by copies, such as sparse ones and caches that grow.
    _copied: set[str] = attrs.field(factory=set, init=False)
    _buffers: list[str] = attrs.field(factory=list, init=False)  # the names of those that are not
    _frozen: list[_Slot] = attrs.field(factory=list, init=False)  # of parameters without an average
    _used_by: set[object] = attrs.field(factory=set, init=False)
    _is_in_model: bool = attrs.field(default=False, init=False)
    _is_sharded: bool = attrs.field(default=False, init=False)
    _state: State | None = attrs.field(default=None, init=False)
    # The batch and the versions of the weights after the training or the last exchange, to which the averages belong.
    _left: tuple[int, list[tuple[int, int]]] | None = attrs.field(default=None, init=False)
    _has_ended: bool = attrs.field(default=False, init=False)
    _has_warned: bool = attrs.field(default=False, init=False)

    def __bool__(self) -> bool:
        return bool(self._outside)

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """Initialise those averages that do not exist yet with the model's weights."""
        reshard(model)
        weights = self._bind(model, begins=True)
        self._outside |= {name: _new_average(one) for name, one in weights.items() if name not in self._outside}

    def check(self, model: nn.Module, *, training: bool) -> None:
        """Raise an error for another model, and for training while the averages are in the model."""
        if self._model is None and self._outside:
            self._check_loaded(model)
            weights = self._bind(model)
            loaded = {name: self._outside[name].to(weight.device) for name, weight in weights.items()}
            if not self._is_in_model:
                loaded = {name: _new_average(tensor) for name, tensor in loaded.items()}
            self._outside = {name: shard_like(loaded[name], weight) for name, weight in weights.items()}
            self._exact = {
                name: shard_like(tensor.to(weights[name].device), weights[name]) for name, tensor in self._exact.items()
            }
        if self._model is not None and self._model is not model:
            raise RuntimeError(
                f"This {self.owner} has averaged another model, a {type(self._model).__name__}. Each training needs an "
                f"{self.owner} of its own: algorithms=[{self.owner}(...)]."
            )
        if self._is_in_model and training:
            raise RuntimeError(
                f"{self.owner}'s averages are still in the model, and have been trained as if they were its weights: "
                "an evaluation was interrupted. After a failed evaluation call engine.restore() before training."
            )

    def tensors(self, names: Iterable[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the averages with these names and the model's weights during training, in the same order.

        For sharded weights (DTensors, as ``fully_shard`` creates them) these are the local parts.
        """
        averages, weights = [], []
        for name in names:  # without a call for each tensor, as this is in each step
            holder, key = self._slots[name]
            average, weight = self._outside[name], holder.get(key)
            averages.append(average)
            weights.append(average if weight is None else weight)  # as in _tensor
        return (local_parts(averages), local_parts(weights)) if self._is_sharded else (averages, weights)

    @torch.no_grad()
    def update(self, model: nn.Module, smoothing: float) -> None:
        """Begin with the weights of the model, or move the averages towards them; ``smoothing`` is their share."""
        if not self:
            self.begin(model)
            return
        frozen = self._frozen
        if frozen and any(getattr(holder.get(key), "requires_grad", False) for holder, key in frozen):
            self.begin(model)
        self._find_changed()
        update_averages(*self.tensors(self._averaged), smoothing)
        if self.held:
            update_averages(*self.tensors(self.held), smoothing=0)
        for name in self._copied:
            self._outside[name] = self._tensor(name).clone()

    def without_average(self) -> dict[str, Tensor]:
        """Return the parameters of the model that have no average, by name."""
        return {name: holder[key] for name, (holder, key) in self._slots.items() if name not in self._outside}

    def _find_changed(self) -> None:
        """Replace buffers by copies from now on whose shape has changed."""
        changed = {name for name in self._buffers if not _has_shape_of(self._tensor(name), self._outside[name])}
        if changed:
            self._copied |= changed
            self._averaged, self.held, self._buffers = (
                [name for name in names if name not in changed] for names in (self._averaged, self.held, self._buffers)
            )

    def _tensor(self, name: str) -> Tensor:
        """Return a weight of the model; if a module has removed a buffer, the copy outside."""
        holder, key = self._slots[name]
        tensor = holder.get(key)
        return self._outside[name] if tensor is None else tensor

    def swap(self, event: Event) -> None:
        """Move the averages into the model when an evaluation or prediction starts, and out at its end."""
        if event in _SWAP_IN:
            self._used_by.add(event)
        else:
            self._used_by.discard(_SWAP_OUT[event])
        # A prediction within an evaluation does not end the evaluation.
        self._exchange(into_model=bool(self._used_by) and not self.are_outdated())

    def in_model(self, model: nn.Module) -> AbstractContextManager[None] | None:
        """Return a context in which the averages are in the model; None if there are none of its weights.

        Its end also ends evaluations that started within it and failed.
        """
        if not self._outside:
            return None
        self.check(model, training=False)
        return None if self.are_outdated() else self._in_model()

    @contextlib.contextmanager
    def _in_model(self) -> Iterator[None]:
        before = set(self._used_by)
        self._used_by.add(object())
        self._exchange(into_model=True)
        try:
            yield
        finally:
            self._used_by &= before
            self._exchange(into_model=bool(self._used_by))

    def restore(self) -> None:
        """Restore the training weights."""
        self._used_by.clear()
        self._exchange(into_model=False)

    def begin_fit(self, state: State) -> bool:
        """Restore the training weights, and return whether a new training starts, in which case averages are discarded.

        Loaded averages are kept, whatever the timestamp.
        """
        is_outdated = self._has_ended and self.are_outdated()
        self._state, self._left, self._has_ended = state, None, False
        restarts = self._model is not None and not state.timestamp.count(TimeUnit.BATCH)
        if self._model is None and self._outside and not self._is_in_model:
            self._check_loaded(state.model)  # the first update binds them, as the model may be sharded before
            return False
        self.check(state.model, training=False)
        self.restore()
        if restarts or is_outdated:
            self._outside, self._slots = {}, {}
        return restarts

    def end_fit(self) -> None:
        """Remember the weights with which a training ends."""
        self._has_ended = True
        self._remember_weights()

    def are_outdated(self) -> bool:
        """Return whether the weights were changed after the training, or between evaluations; warn at the first time.

        Seen are changes in place, as by ``load_state_dict``, and other parameters; not assignments to ``data``.
        """
        if self._left is None or self._state is None or self._is_in_model:
            return False
        batch, versions = self._left
        if self._state.timestamp.counts.batch != batch or self._versions() == versions:
            return False
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The weights of the model were changed after their training, so {self.owner}'s averages, which belong "
                "to the trained weights, are not used: the model is evaluated and saved as it is.",
                stacklevel=caller_level(),
            )
        return True

    def _remember_weights(self) -> None:
        # Optimizers with averages of their own, such as schedule-free ones, write weights around evaluations, too.
        if self._state is not None and not any(has_modes(unwrapped(one)) for one in self._state.optimizers):
            self._left, self._has_warned = (self._state.timestamp.counts.batch, self._versions()), False

    def _versions(self) -> list[tuple[int, int]]:
        """Return what identifies the model's parameters and their values; another device changes none of it."""
        if self._is_sharded and self._model is not None:
            reshard(self._model)
        weights = [one for holder, key in self._slots.values() if isinstance(one := holder.get(key), nn.Parameter)]
        return [(id(one), -1 if one.is_inference() else one._version) for one in weights]  # noqa: SLF001  (torch has no other)

    def keep_in_model(self) -> None:
        """Keep the averages in the model, and discard the training weights."""
        self._exchange(into_model=True)
        self._outside, self._exact, self._slots, self._is_in_model = {}, {}, {}, False

    def warn_if_empty(self, algorithm: Algorithm, start: Time, state: State) -> None:
        """Warn if a fit has ended without an average."""
        if not self._outside:
            warn_at_end(
                state,
                f"{algorithm!r} has averaged nothing: it begins at {start}, and the fit ended before. Start earlier.",
            )

    def copy_into(self, model: nn.Module, *, averaged: bool) -> nn.Module:
        """Return a copy of the model with the averages, or with the training weights."""
        copied = copy.deepcopy(model)
        if averaged is not self._is_in_model:  # `_outside` has the weights that the model does not have
            slots = _find_slots(copied)
            with torch.no_grad():
                for name in slots.keys() & self._outside.keys():
                    holder, key = slots[name]
                    if isinstance(holder[key], nn.Parameter):
                        holder[key].copy_(self._outside[name])
                    else:
                        holder[key] = self._outside[name].to(holder[key].dtype, copy=True)
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return the weights that are not in the model, under the name of their kind; no outdated averages."""
        if not self._outside or (self._has_ended and self.are_outdated()):
            return {}
        kind = "training_weights" if self._is_in_model else "averaged_weights"
        state = {kind: {name: tensor for name, tensor in self._outside.items() if name not in self._copied}}
        return {**state, "exact_averages": dict(self._exact)} if self._exact else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; it is compared with the model when :meth:`check` is first called."""
        self._is_in_model = "training_weights" in state
        saved = state.get("training_weights") or state.get("averaged_weights") or {}
        # Copies, because they are updated in place.
        self._outside, self._exact = (
            {name: tensor.clone() for name, tensor in tensors.items()}
            for tensors in (saved, state.get("exact_averages") or {})
        )
        self._model, self._slots, self._copied = None, {}, set()
        self._left, self._has_ended = None, False
        self._used_by.clear()

    def _check_loaded(self, model: nn.Module) -> None:
        """Compare names and shapes of loaded weights with those of the model.

        Parameters that were frozen and buffers may be missing; buffers may have grown.
        """
        weights = {name: holder[key] for name, (holder, key) in _find_slots(model).items()}
        for name in map(bare_name, tensor_slots(bare_model(model), empty=True)):  # a cache that is filled later
            self._outside.pop(name, None)
        for name, weight in weights.items():
            if not isinstance(weight, nn.Parameter) and not _has_shape_of(weight, self._outside.get(name)):
                self._outside[name] = weight.clone()
        missing = sorted(weights.keys() - self._outside.keys())
        unexpected = sorted(self._outside.keys() - weights.keys())
        if unexpected:
            raise ValueError(
                f"The weights that {self.owner} saved are of another model: missing are {few(missing)}, unexpected "
                f"are {few(unexpected)}. Build the model, and apply the surgery, as when they were saved."
            )
        for name, saved in self._outside.items():
            if isinstance(weights[name], nn.Parameter) and weights[name].shape != saved.shape:
                raise ValueError(
                    f"The weights that {self.owner} saved are of another model: {name!r} has shape "
                    f"{tuple(saved.shape)} there and {tuple(weights[name].shape)} here."
                )

    def _bind(self, model: nn.Module, *, begins: bool = False) -> dict[str, Tensor]:
        """Remember the model, and return its weights with averages by name; with ``begins`` all that are trained."""
        self._model, self._slots = model, _find_slots(model)
        weights = {name: holder[key] for name, (holder, key) in self._slots.items()}
        weights = {
            name: weight
            for name, weight in weights.items()
            if name in self._outside or not isinstance(weight, nn.Parameter) or (begins and weight.requires_grad)
        }
        self._frozen = [slot for name, slot in self._slots.items() if name not in weights]
        self._copied = {name for name, weight in weights.items() if not is_dense(weight)}
        dense = {name: weight for name, weight in weights.items() if name not in self._copied}
        self._buffers = [name for name, weight in dense.items() if not isinstance(weight, nn.Parameter)]
        self.held = [name for name in self._buffers if average_dtype(dense[name].dtype) and not is_statistic(name)]
        held = set(self.held)
        self._averaged = [name for name in dense if name not in held]
        self._is_sharded = any(map(is_dtensor, weights.values()))
        return weights

    @torch.no_grad()
    def _exchange(self, *, into_model: bool) -> None:
        if self._is_in_model is into_model or not self._slots:
            return
        if self._is_sharded and self._model is not None:
            # After a forward pass the modules may still hold gathered weights, to which the parts would not be copied.
            reshard(self._model)
        self._find_changed()
        names = [*self._averaged, *self.held]
        averages, weights = self.tensors(names)
        # The dictionaries get other tensors, because those in float32 must not be rounded to the model's precision.
        inside = {name: self._tensor(name).clone() for name in names}
        expanded = [weight for weight in weights if 0 in weight.stride()]
        for weight in expanded:
            weight.data = weight.clone()  # no values can be copied to elements that share memory
        torch._foreach_copy_(weights, averages)
        exact = {name: self._outside[name] for name in names if self._outside[name].dtype != inside[name].dtype}
        self._outside |= inside | self._exact
        self._exact = exact if into_model else {}
        for name in self._copied:
            holder, key = self._slots[name]
            if holder.get(key) is not None:
                holder[key], self._outside[name] = self._outside[name], holder[key]
        self._is_in_model = into_model
        if not into_model:
            self._remember_weights()


def _new_average(weight: Tensor) -> Tensor:
    """Return a copy of a weight, at least in float32 if it is averaged."""
    dtype = average_dtype(weight.dtype)
    return weight.clone() if dtype is None or not is_dense(weight) else weight.detach().to(dtype, copy=True)


def _has_shape_of(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and is_dense(tensor) and is_dense(other) and tensor.shape == other.shape


def _find_slots(model: nn.Module) -> dict[str, _Slot]:
    """Return, by its name in the unwrapped model, the place of each parameter and buffer; shared tensors once."""
    slots = tensor_slots(bare_model(model))
    first = {id(holder[key]): name for name, (holder, key) in reversed(slots.items())}
    return {bare_name(name): slot for name, slot in slots.items() if first[id(slot[0][slot[1]])] == name}

"""A second set of weights, averaged over training, that takes the model's place for evaluations."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from composer.core import Event, ExclusiveResource, NoEffectWarning, TimeUnit
from composer.core.evaluation_weights import reshard
from composer.core.serialization import from_data

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from composer.core import Algorithm, State, Time

__all__ = ["EVALUATION_WEIGHTS", "SWAPS", "AveragedWeights"]

_SWAP_IN = frozenset({Event.EVAL_START, Event.PREDICT_START})
_SWAP_OUT = {Event.EVAL_END: Event.EVAL_START, Event.PREDICT_END: Event.PREDICT_START}

EVALUATION_WEIGHTS = ExclusiveResource(
    "the weights used for evaluation",
    remedy="A model is evaluated with one average: that of all the training (EMA) or that of its last part (SWA).",
)

SWAPS = frozenset({*_SWAP_IN, *_SWAP_OUT})
"""The events at which averaged and training weights are exchanged."""


@attrs.define(eq=False)
class AveragedWeights:
    """Averages of a model's parameters and buffers, which it holds or which wait outside.

    Args:
        owner: The class of the algorithm they belong to, for errors.
    """

    owner: str
    _model: nn.Module | None = attrs.field(default=None, init=False)
    # What is not in the model now: the averages, or, while those are in it, the weights that are trained.
    _outside: dict[str, Tensor] = attrs.field(factory=dict, init=False)
    # Not the weights but where modules hold them: these may put in a new tensor, `self.mean = 0.9 * self.mean`.
    _places: list[tuple[dict[str, Tensor], str]] = attrs.field(factory=list, init=False)
    _used_by: set[object] = attrs.field(factory=set, init=False)
    _is_in_model: bool = attrs.field(default=False, init=False)
    _is_sharded: bool = attrs.field(default=False, init=False)

    def __bool__(self) -> bool:
        return bool(self._outside)

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """Start with the model's weights."""
        reshard(model)
        self._model, places = model, _places(model)
        self._places = list(places.values())
        self._is_sharded = any(_is_sharded(weight) for weight in self._weights())
        self._outside = {name: weight.clone() for name, weight in zip(places, self._weights(), strict=True)}

    def check(self, model: nn.Module, *, training: bool) -> None:
        """Refuse another model than the one that is averaged, and training while the averages are in it."""
        if self._model is None and self._outside:
            self._bind(model)
        if self._model is not None and self._model is not model:
            raise RuntimeError(
                f"This {self.owner} has averaged another model, a {type(self._model).__name__}. Give each training an "
                f"{self.owner} of its own: algorithms=[{self.owner}(...)]."
            )
        if self._is_in_model and training:
            raise RuntimeError(
                f"{self.owner}'s averages are still in the model, and have been trained as if they were its weights: "
                "an evaluation was broken off. Call engine.restore() when one fails, before training goes on."
            )

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the averages and the model's weights, in the same order, while training goes on.

        Of sharded weights (DTensors, as ``fully_shard`` makes them) these are the parts that this process holds.
        """
        return self._own_parts(list(self._outside.values())), self._own_parts(self._weights())

    def swap(self, event: Event) -> None:
        """Put the averages into the model when an evaluation or prediction starts, and out again at its end."""
        if event in _SWAP_IN:
            self._used_by.add(event)
        else:
            self._used_by.discard(_SWAP_OUT[event])
        self._exchange(into_model=bool(self._used_by))  # a prediction within an evaluation does not end that

    def in_model(self, model: nn.Module) -> AbstractContextManager[None] | None:
        """Return a context in which the averages are in the model; None if there are none.

        Whatever began within the context, such as an evaluation that failed, ends with it.
        """
        if not self._outside:
            return None
        self.check(model, training=False)
        return self._in_model()

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
        """Put the training weights back."""
        self._used_by.clear()
        self._exchange(into_model=False)

    def begin_fit(self, state: State) -> bool:
        """Put the training weights back, and return whether a training has begun again, whose averages are forgotten.

        Those that were loaded are kept, whatever the clock says.
        """
        begins_again = self._model is not None and not state.timestamp.count(TimeUnit.BATCH)
        self.check(state.model, training=False)
        self.restore()
        if begins_again:
            self._outside, self._places = {}, []
        return begins_again

    def keep_in_model(self) -> None:
        """Let the model go on from the averages, and forget what it had."""
        self._exchange(into_model=True)
        self._outside, self._places, self._is_in_model = {}, [], False

    def warn_if_empty(self, algorithm: Algorithm, start: Time) -> None:
        """Say that a fit has ended without an average."""
        if not self._outside:
            warnings.warn(
                f"{algorithm!r} has averaged nothing: it begins at {start}, and the fit ended before. Begin earlier.",
                NoEffectWarning,
                stacklevel=3,
            )

    def copy_into(self, model: nn.Module, *, averaged: bool) -> nn.Module:
        """Return a copy of the model with the averages, or with the weights that are trained."""
        copied = copy.deepcopy(model)
        if averaged is not self._is_in_model:
            own: dict[str, Any] = {**dict(copied.named_parameters()), **dict(copied.named_buffers())}
            with torch.no_grad():
                for name, tensor in self._outside.items():
                    own[name].copy_(tensor)
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return the weights that the model does not hold, under a name that says which they are."""
        if not self._outside:
            return {}
        return {"training_weights" if self._is_in_model else "averaged_weights": dict(self._outside)}

    def check_state_dict(self, state: dict[str, Any], **also: Any) -> None:
        """Refuse what an algorithm with averaged weights, and with ``also`` beside them, does not save.

        Args:
            state: What was saved.
            also: The types of the further values, by name.

        Raises:
            ValueError: A key is missing or unknown, or a value is of another type.
        """
        known = {"averaged_weights", "training_weights", *also}
        missing, unknown = sorted({*also} - state.keys()), sorted(state.keys() - known)
        if missing or unknown or len({"averaged_weights", "training_weights"} & state.keys()) == 2:
            raise ValueError(
                f"This is not what {self.owner} saves: {_shown(missing)} are missing, {_shown(unknown)} are unknown; "
                "of averaged_weights and training_weights there is at most one."
            )
        for name, value in state.items():
            from_data(value, also.get(name, dict[str, Tensor]), f"{self.owner}.{name}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; the model is looked at when it is first seen."""
        self._is_in_model = "training_weights" in state
        saved = state.get("training_weights") or state.get("averaged_weights") or {}
        # Copies, as they will be changed in place.
        self._outside = {name: tensor.clone() for name, tensor in saved.items()}
        self._model, self._places = None, []
        self._used_by.clear()

    def _bind(self, model: nn.Module) -> None:
        places = _places(model)
        missing, unexpected = sorted(places.keys() - self._outside.keys()), sorted(self._outside.keys() - places.keys())
        if missing or unexpected:
            raise ValueError(
                f"The weights that {self.owner} saved are of another model: {_shown(missing)} are missing, "
                f"{_shown(unexpected)} are too many. Build the model, and its surgery, as it was when they were saved."
            )
        for name, (holder, key) in places.items():
            if holder[key].shape != self._outside[name].shape:
                raise ValueError(
                    f"The weights that {self.owner} saved are of another model: {name!r} has shape "
                    f"{tuple(self._outside[name].shape)} there and {tuple(holder[key].shape)} here."
                )
        self._model, self._places = model, list(places.values())
        self._is_sharded = any(_is_sharded(weight) for weight in self._weights())
        pairs = zip(places, self._weights(), strict=True)
        self._outside = {name: self._outside[name].to(weight.device) for name, weight in pairs}

    def _weights(self) -> list[Tensor]:
        return [holder[name] for holder, name in self._places]

    @torch.no_grad()
    def _exchange(self, *, into_model: bool) -> None:
        if self._is_in_model is into_model or not self._places:
            return
        if self._is_sharded and self._model is not None:
            reshard(self._model)
        outside, weights = self.tensors()
        held = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, outside)
        torch._foreach_copy_(outside, held)
        self._is_in_model = into_model

    def _own_parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return tensors as they are, or of DTensors, for which torch has no foreach kernels, their local parts."""
        if not self._is_sharded:
            return tensors
        return [tensor.to_local() if _is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")  # a DTensor; asking so does not import what defines it


def _places(model: nn.Module) -> dict[str, tuple[dict[str, Tensor], str]]:
    """Return by its full name where each parameter and buffer is held; shared ones once."""
    found: dict[str, tuple[dict[str, Tensor], str]] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for holder in (vars(module)["_parameters"], vars(module)["_buffers"]):
            for name, tensor in holder.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{path}.{name}" if path else name] = holder, name
    return found


def _shown(names: list[str]) -> str:
    return ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])]) or "none"

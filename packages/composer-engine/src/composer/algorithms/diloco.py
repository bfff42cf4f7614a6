"""DiLoCo: train in each process alone, and average the weights at intervals."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from composer import functional as cf
from composer.algorithms._averages import has_passed, to_interval
from composer.algorithms._idle import warn_at_end
from composer.core import Algorithm, Event, Logger, Stage, State, Time, TimeUnit, saved
from composer.core.checks import is_flag, number
from composer.core.declarations import owned
from composer.core.evaluator import has_modes
from composer.core.optimizers import unwrapped
from composer.core.saving.components import read_state, reset_fields, transient
from composer.core.saving.model_state import bare_model, bare_name
from composer.functional.dtensors import is_dtensor, rank_and_processes

_NOT_IN_FORMER: dict[str, Any] = {"own_weights": {}}
"""What states of former versions, saved within a training, do not have."""


def _to_interval(given: Time | str | int) -> Time:
    return to_interval(given, "sync_every")


@attrs.define(eq=False)
class DiLoCo(Algorithm):
    """Train in each process without exchanging gradients, and average the weights at intervals (arXiv:2311.08105).

    See :func:`composer.functional.compute_outer_step`. Each process takes the steps of its optimizer with the gradients
    of its own share of each batch. At an interval, the mean of the weights over all processes is the gradient of an
    outer step of SGD with Nesterov momentum, and all continue with its result. ``outer_lr=1, outer_momentum=0`` is
    local SGD (arXiv:1805.09767); ``Muon`` as the optimizer is MuLoCo (arXiv:2505.23725).

    Gradients are weighed as by DDP, by the number of elements of each process. After a single step of SGD without
    momentum, the mean of the weights is then DDP's result, up to rounding.

    The weights of all optimizers are averaged. Evaluation uses those after the last outer step, and the buffers of the
    first process, as it always does. A training that is not stopped has a last outer step at its end. One that is
    stopped before leaves the weights after the last outer step in the model, and continues with those of each process.
    Checkpoints have the weights and the state of the optimizers of each process. In one process, the outer steps are
    those of its own weights.

    Args:
        sync_every: The interval of outer steps, in batches or epochs.
        outer_lr: The learning rate of the outer steps, more than 0.
        outer_momentum: Their momentum, in ``[0, 1)``.
        nesterov: Whether it is Nesterov momentum.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is out of range, the model is sharded or has weights in 16 bits, or an optimizer has
            separate weights for evaluation (schedule-free). In training of several processes: there is no Trainer, the
            model has SyncBatchNorm, losses are scaled (``amp_fp16``), or an optimizer exchanges results
            (``divide_work``) or estimates its rate from gradients (Prodigy).
        AlgorithmConflictError: ``EMA`` or ``SWA`` averages the weights, too, or ``DepthStacking`` will add some.

    Example:
        >>> DiLoCo(sync_every="100ba").outer_lr
        0.7
    """

    sync_every: Time = attrs.field(default="30ba", converter=_to_interval)
    outer_lr: float = number(0.7, 0, above=True, meaning="It is the learning rate of the outer steps.")
    outer_momentum: float = number(0.9, 0, 1, below=True, meaning="It is the decay of outer gradients.")
    nesterov: bool = attrs.field(default=True, validator=is_flag)

    # After the last outer step, in all processes; under this name, readers of checkpoints find them.
    _averaged_weights: dict[str, Tensor] = saved(factory=dict)
    _momenta: dict[str, Tensor] = saved(factory=dict)
    _is_apart: bool = saved(default=False)  # whether there was a step since
    # Of the first process, where a training was stopped between outer steps; the model has those after the last one.
    _own_weights: dict[str, Tensor] = saved(factory=dict)

    _end: Time | None = transient(default=None)  # of this fit, before a stop moves it
    _left: dict[str, Tensor] = transient(factory=dict)  # the weights of the model, after a fit
    _is_swapped: bool = transient(default=False)
    of_process: Any = transient(default=None)

    acted = 0
    trains_apart = True
    runs_at: ClassVar = dict.fromkeys(
        (Event.FIT_START, Event.BATCH_START, Event.BATCH_END, Event.EPOCH_END, Event.FIT_END), Stage.WEIGHTS
    )
    reads: ClassVar = {"model", "optimizers", "timestamp", "max_duration", "dataloader_len"}
    writes: ClassVar = {"model"}
    owns: ClassVar = owned(
        "the weights used for evaluation", "DiLoCo evaluates with the weights after its last outer step: choose one."
    )

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Begin with the weights of the model; note each step; take an outer step at the interval and at the end."""
        if event is Event.FIT_START:
            if not state.timestamp.count(TimeUnit.BATCH):
                reset_fields(self)
            _check(state)
            self._begin_fit(state)
        elif event is Event.BATCH_START:
            if not self._averaged_weights:
                self._begin(state)
            self._is_apart = True
        else:
            if self._is_apart and (has_passed(self.sync_every, event, state) or self._is_complete(event, state)):
                self._synchronize(state)
            if event is Event.FIT_END:
                self._end_fit(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, or that of a new one if the model has got other weights after the training."""
        is_of_others = self._left and _differ(self._left, self._averaged_weights)
        return DiLoCo().state_dict() if is_of_others else super().state_dict()

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Check that ``state`` is a result of :meth:`state_dict`.

        Raises:
            ValueError: A key is missing or unknown, or a value is of another type.
        """
        read_state(self, _NOT_IN_FORMER | state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, with which the next fit continues."""
        super().load_state_dict(_NOT_IN_FORMER | state)
        self._left = {}

    def evaluation_weights(self, state: State) -> AbstractContextManager[None] | None:
        """Return a context in which the model has the weights after the last outer step; None if it has them."""
        is_in_model = self._is_swapped or self._own_weights or not self._is_apart
        return None if is_in_model else self._in_model(state)

    @contextlib.contextmanager
    def _in_model(self, state: State) -> Iterator[None]:
        weights = _trained(state)
        own = {name: weight.detach().clone() for name, weight in weights.items()}
        self._is_swapped = True
        try:
            _copy(weights, self._averaged_weights)
            yield
        finally:
            _copy(weights, own)
            self._is_swapped = False

    def _is_complete(self, event: Event, state: State) -> bool:
        """Return whether the training is at its end, and not where it was stopped before, to be resumed there."""
        if all(end is not None and state.has_reached(end) for end in (self._end, state.max_duration)):
            return True
        # A loop may have no duration. Only one process may have been stopped, and all must decide the same.
        return event is Event.FIT_END and not _is_any(state, state.stop_reason is not None)

    def _begin_fit(self, state: State) -> None:
        """Continue with the weights of this process; begin again if others were loaded since the last fit."""
        weights, self._end, self._left = _trained(state), state.max_duration, {}
        if self._own_weights or (self._averaged_weights and not self._is_apart):
            are_loaded = _differ(weights, self._averaged_weights)
            if _is_any(state, are_loaded):
                self._averaged_weights, self._momenta, self._own_weights, self._is_apart = {}, {}, {}, False
        if self._own_weights:
            _copy(weights, self._own_weights)
            self._own_weights = {}
        self.of_process = _process_state(self, state)

    def _end_fit(self, state: State) -> None:
        """Leave the weights after the last outer step in the model, which are the same in all processes."""
        self._left = weights = _trained(state)
        if self._is_apart:
            self._own_weights = {name: weight.detach().clone() for name, weight in weights.items()}
            _copy(weights, self._averaged_weights)
            if not any(momentum.any() for momentum in self._momenta.values()):
                warn_at_end(
                    state,
                    f"DiLoCo has taken no outer step until {state.timestamp.batch}, where the fit ended: the model has "
                    f"the weights with which it began. Choose a shorter sync_every than {self.sync_every}.",
                )

    def _begin(self, state: State) -> None:
        weights = _trained(state)
        if unfit := [name for name, one in weights.items() if is_dtensor(one) or one.dtype.itemsize < 4]:
            raise ValueError(
                f"DiLoCo averages weights that are complete in each process, with at least 32 bits, got {unfit[0]!r}: "
                "train without FSDP2 and tensor parallelism, and with precision='amp_bf16' for weights in 32 bits."
            )
        if rank_and_processes()[1] > 1:  # a resumed run may have loaded those of each process, without the averages
            for weight in weights.values():
                torch.distributed.broadcast(weight.detach(), 0)
        self._averaged_weights = {name: weight.detach().clone() for name, weight in weights.items()}
        self._momenta = {name: torch.zeros_like(weight) for name, weight in self._averaged_weights.items()}

    @torch.no_grad()
    def _synchronize(self, state: State) -> None:
        """Take an outer step with the mean of the weights of all processes."""
        weights = _trained(state)
        if different := weights.keys() ^ self._averaged_weights.keys():
            raise ValueError(
                f"DiLoCo must average the same weights in the entire training, and {min(different)!r} was added or "
                "removed. Change the model, and what the optimizers train, before it."
            )
        before, momenta = (
            [held[name].to(weight.device) for name, weight in weights.items()]  # that of a resumed run may be another
            for held in (self._averaged_weights, self._momenta)
        )
        differences = _means(torch._foreach_sub(before, [*weights.values()]))
        settings = self.outer_lr, self.outer_momentum
        results = cf.compute_outer_step(before, differences, momenta, *settings, nesterov=self.nesterov)
        self._averaged_weights, self._momenta = (dict(zip(weights, one, strict=True)) for one in results)
        _copy(weights, self._averaged_weights)
        self._is_apart = False
        self.acted += 1


def _trained(state: State) -> dict[str, Tensor]:
    """Return the weights of the optimizers by name."""
    held = {id(one) for each in state.optimizers for group in unwrapped(each).param_groups for one in group["params"]}
    return {bare_name(name): one for name, one in bare_model(state.model).named_parameters() if id(one) in held}


def _is_any(state: State, answer: bool) -> bool:
    """Return whether the answer of any process is yes."""
    return any(state.gather(answer) if state.gather is not None else [answer])


def _differ(weights: dict[str, Tensor], before: dict[str, Tensor]) -> bool:
    return weights.keys() != before.keys() or any(
        not torch.equal(one, before[name].to(one.device)) for name, one in weights.items()
    )


@torch.no_grad()
def _copy(weights: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    torch._foreach_copy_([*weights.values()], [values[name].to(one.device) for name, one in weights.items()])


def _means(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the means over all processes, by one reduction."""
    _, num_processes = rank_and_processes()
    if num_processes == 1:
        return list(tensors)
    flat = torch.cat([one.flatten() for one in tensors])
    torch.distributed.all_reduce(flat)
    flat /= num_processes
    parts = torch.split(flat, [one.numel() for one in tensors])
    return [part.view(one.shape).to(one.dtype) for part, one in zip(parts, tensors, strict=True)]


def _check(state: State) -> None:
    """Raise a ValueError for an optimizer with two sets of weights, and for exchanges of more than the weights."""
    optimizers = [unwrapped(one) for one in state.optimizers]
    if found := [type(one).__name__ for one in optimizers if has_modes(one)]:
        raise ValueError(
            f"DiLoCo averages the weights of the model, and {found[0]} has others in its state, which would keep those "
            "before an outer step. Use an optimizer that trains and evaluates with the same weights, such as AdamW."
        )
    if rank_and_processes()[1] == 1:
        return
    problems = {
        "this training loop, which averages gradients; use the Trainer": state.gather is None,
        "precision='amp_fp16', as each process would skip other steps; use 'amp_bf16'": state.scaler is not None,
        "SyncBatchNorm; use BatchNorm": any(isinstance(one, nn.SyncBatchNorm) for one in state.model.modules()),
        "divide_work=True of Muon, as gradients differ; use False": any(
            getattr(one, "divide_work", False) for one in optimizers
        ),
        "an optimizer that estimates its rate from gradients, as they differ; use a fixed one": any(
            "d" in group
            for one in optimizers
            for group in one.param_groups  # of Prodigy and D-Adaptation
        ),
    }
    if found := [problem for problem, exists in problems.items() if exists]:
        raise ValueError(f"DiLoCo trains in each process alone, which excludes {'; and '.join(found)}.")


def _process_state(algorithm: DiLoCo, state: State) -> types.SimpleNamespace | None:
    """Return an object that saves and loads the weights and the states of optimizers of a process but the first."""
    if rank_and_processes()[1] == 1:
        return None
    optimizers = [unwrapped(one) for one in state.optimizers]

    def trained() -> list[tuple[Any, Tensor]]:
        return [(one, weight) for one in optimizers for group in one.param_groups for weight in group["params"]]

    def save() -> dict[str, Any]:
        if torch.distributed.get_rank() == 0:  # those of the first are in the checkpoint
            return {}
        states = [_map(lambda value: value.cpu(), one.state.get(weight, {})) for one, weight in trained()]
        weights = algorithm.state_dict()["own_weights"] or _trained(state)
        return {"weights": _map(lambda value: value.detach().cpu(), weights), "optimizers": states}

    def load(loaded: dict[str, Any]) -> None:
        if loaded:
            _copy(_trained(state), loaded["weights"])
        for (optimizer, weight), values in zip(trained(), loaded.get("optimizers", ()), strict=False):
            _load_values(optimizer.state, weight, values)

    return types.SimpleNamespace(state_dict=save, load_state_dict=load)


def _map(function: Callable[[Tensor], Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: function(one) if isinstance(one, Tensor) else one for name, one in values.items()}


def _load_values(states: MutableMapping[Tensor, dict[str, Any]], weight: Tensor, values: dict[str, Any]) -> None:
    """Replace the state of a weight; one number, such as a count of steps, stays where that of the optimizer is."""
    held = states.pop(weight, {})
    if values:
        places = {name: one.device for name, one in held.items() if isinstance(one, Tensor)}
        found = {
            name: one.to(places.get(name, weight.device if one.dim() else one.device))
            for name, one in values.items()
            if isinstance(one, Tensor)
        }
        states[weight] = values | found

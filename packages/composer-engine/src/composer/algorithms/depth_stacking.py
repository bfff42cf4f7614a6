"""DepthStacking: grow the model to a deeper one during training."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import attrs
from attrs.converters import optional
from attrs.validators import optional as if_given
from torch import nn

from composer import functional as cf
from composer.algorithms._averages import WeightAveraging, to_moment
from composer.algorithms._idle import warn_at_end, warn_of_no_effect
from composer.algorithms._surgery import ModelSurgery
from composer.algorithms.diloco import DiLoCo
from composer.algorithms.post_hoc import PostHocEMA
from composer.core import AlgorithmConflictError, Event, Logger, Stage, State, Time, saved
from composer.core.checks import by_name, caller_level, integer, one_of, to_strings
from composer.core.declarations import Conflict
from composer.core.saving.components import reset_fields, transient
from composer.functional import SurgeryReport
from composer.functional.checks import check_string
from composer.functional.surgery.depth_stacking import find_stack


def _to_at(value: Time | str | int) -> Time:
    return to_moment(value, "at")


def _to_names(given: str | Iterable[str] | None) -> tuple[str, ...]:
    return tuple(to_strings("zero_layers", given))


@attrs.define(eq=False)
class DepthStacking(ModelSurgery):
    """Make the model deeper by copies of its blocks, with the state of the optimizers (arXiv:2405.15319).

    See :func:`composer.functional.apply_depth_stacking`. The model grows before the first batch at or after ``at``; in
    several processes at the start of the first epoch at or after it, where DDP registers the parameters. Averages of
    weights, such as EMA's, begin again.

    The growth adds a ``DepthStacking(at=None, ...)`` to the algorithms, which a checkpoint has, and which a resumed run
    applies to its shallow model before the weights are loaded.

    Args:
        at: When the model grows: a time, such as ``"0.2dur"``; an int is a number of batches. None is at construction.
        factor: How many times as many blocks the model has afterwards.
        order: ``"stack"`` repeats all blocks, ``"interleave"`` each block.
        blocks: The path of the list of blocks in the model; if None, found by their class.
        zero_layers: The names, within a block, of the layers that are 0 in the copies, so that outputs do not change.

    Raises:
        TypeError: A value is of the wrong kind.
        ValueError: A value is out of range. Before the first batch: the model has no such list, or FSDP2 has split it.

    Example:
        >>> DepthStacking("0.2dur", factor=4).at
        Time(0.2, TimeUnit.DURATION)
    """

    at: Time | None = attrs.field(default="0.1dur", converter=optional(_to_at))  # type: ignore[assignment]  # mypy overlooks the converter
    factor: int = integer(2, 2, meaning="The model has so many times as many blocks.")
    order: str = attrs.field(default="stack", validator=one_of("stack", "interleave"))
    blocks: str | None = attrs.field(default=None, validator=if_given(by_name(check_string)))
    zero_layers: tuple[str, ...] = attrs.field(default=(), converter=_to_names)
    _has_grown: bool = saved(default=False)
    _is_checked: bool = transient(default=False)  # in this fit, after FSDP2 may have split the model
    _last_blocks: list[nn.Module] = transient(factory=list)  # those beyond the former depth, until they are trained

    acted = 0
    acted_unit = "layers"
    _kernel: ClassVar = staticmethod(cf.apply_depth_stacking)
    runs_at: ClassVar = dict.fromkeys(
        (Event.INIT, Event.FIT_START, Event.EPOCH_START, Event.BATCH_START, Event.BATCH_END, Event.FIT_END),
        Stage.ARCHITECTURE,
    )
    reads: ClassVar = {"algorithms", "model", "optimizers", "timestamp", "max_duration", "dataloader_len"}
    writes: ClassVar = {"algorithms", "model", "optimizers"}
    found_nothing: ClassVar = "{model} has no list of equal blocks. Remove it, or set blocks."

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return the events at which it runs: ``INIT`` and ``BATCH_END`` if ``at`` is None, else the others."""
        of_growth = {Event.INIT, Event.BATCH_END}
        return {event: stage for event, stage in self.runs_at.items() if (event in of_growth) is (self.at is None)}

    def required_on_load(self) -> bool:  # type: ignore[override]  # of a class for other algorithms
        """Return whether saved weights only fit a model that it has changed: if it acts at construction."""
        return self.at is None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Grow the model if it is time, and warn if the next batch does not use the copies, or if there are none."""
        if event is Event.INIT:
            self.replace(state, logger)
        elif event is Event.BATCH_END:
            self._check_use(state)
        elif event is Event.FIT_START:
            self._begin(state)
        elif event is Event.FIT_END:
            if not self._has_grown:
                warn_at_end(
                    state,
                    f"{self!r} has not added blocks before the fit ended at {state.timestamp.batch}. Choose an earlier "
                    "`at`; in several processes, the model grows at the start of an epoch only.",
                )
        elif not self._has_grown:
            if not self._is_checked:
                find_stack(state.model, self.blocks, self.zero_layers)
                self._is_checked = True
            assert self.at is not None
            if (event is Event.EPOCH_START or state.gather is None) and state.has_reached(self.at):
                self._grow(state, logger)

    def replace(self, state: State, logger: Logger, **arguments: Any) -> SurgeryReport:
        """Add the blocks, and note those that a forward pass for the former depth would leave out."""
        report = super().replace(state, logger, **arguments)
        paths = [path for entry in report for path in entry.paths]
        stack: Any = state.model.get_submodule(paths[0].rpartition(".")[0]) if paths else ()
        self._last_blocks = list(stack)[len(paths) // (self.factor - 1) :]
        return report

    def _check_use(self, state: State) -> None:
        """Warn if the first batch has gradients, but none of the last blocks."""
        if self._last_blocks and any(one.grad is not None for one in state.model.parameters()):
            weights = [one for block in self._last_blocks for one in block.parameters() if one.requires_grad]
            self._last_blocks = []
            if weights and all(one.grad is None for one in weights):
                warn_of_no_effect(
                    f"{self!r} has added blocks, but the model uses none of them: it iterates over as many as it had "
                    "before. Let its forward iterate over the list, or read its length."
                )

    def _begin(self, state: State) -> None:
        """Find what would prevent the growth before the training starts."""
        self._is_checked = False
        stacked = [one for one in state.algorithms if isinstance(one, DepthStacking)]
        later = [one for one in stacked[stacked.index(self) :] if one.at is None]
        if not state.timestamp.counts.batch:
            reset_fields(self)
        if not self._has_grown and len(later) > sum(one._has_grown for one in stacked):  # noqa: SLF001
            warnings.warn(
                f"The model was made deeper before, by {later[0]!r}, and will grow again by {self!r}. Remove this one "
                "to keep the depth.",
                stacklevel=caller_level(),
            )
        clashing = [one for one in state.algorithms if isinstance(one, (DiLoCo, PostHocEMA))]
        if clashing and not self._has_grown:
            remedy = "It has the weights of one depth: use EMA, which begins again, or grow at construction (at=None)."
            raise AlgorithmConflictError([Conflict(clashing[0], self, ("the number of weights",), (remedy,))])
        if not self._has_grown and find_stack(state.model, self.blocks, self.zero_layers) is None:
            warn_of_no_effect(f"{self!r} would find nothing: {self.explain_nothing(type(state.model).__name__)}")

    def _grow(self, state: State, logger: Logger) -> None:
        at_construction: DepthStacking = attrs.evolve(self, at=None)
        report = at_construction.replace(state, logger)
        self._has_grown, self.acted = True, self.acted + len(report)
        if not report:
            return
        for algorithm in state.algorithms:
            if isinstance(algorithm, WeightAveraging):
                algorithm.begin_again()
        state.algorithms.append(at_construction)

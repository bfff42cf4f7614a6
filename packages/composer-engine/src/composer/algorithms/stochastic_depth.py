"""StochasticDepth: skip residual blocks at random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._idle import warn_if_idle
from composer.algorithms._progress import FRACTION_OF_TRAINING, elapsed_duration
from composer.algorithms._surgery import ModelSurgery
from composer.core import Event, Logger, Stage, State, Time, TimeUnit
from composer.core.checks import number, one_of
from composer.core.declarations import owned
from composer.core.saving.components import transient


def _to_drop_warmup(given: Time | str | float) -> float:
    if not isinstance(given, (Time, str)):
        return given
    time = Time.from_input(given, name="drop_warmup")
    if time.unit is not TimeUnit.DURATION:
        raise ValueError(f"drop_warmup must be a fraction of the training such as 0.6 or '0.6dur', got {str(time)!r}.")
    return time.value


@attrs.define(eq=False)
class StochasticDepth(ModelSurgery):
    """Skip residual blocks at random while training (arXiv:1603.09382).

    See :func:`composer.functional.apply_stochastic_depth`.

    Args:
        target_layer_name: The blocks: a name such as ``"ResNetBottleneck"``, a class, or a mapping of classes to your
            own rules.
        stochastic_method: ``"block"`` skips a block for the entire batch, which saves time; ``"sample"`` for each
            sample independently.
        drop_rate: The probability of skipping the last block (``"linear"``) or every block (``"uniform"``), in
            ``[0, 1]``.
        drop_distribution: Whether the rate grows with the depth, ``"linear"``, or is ``"uniform"``.
        drop_warmup: The fraction of the training during which the rates grow from 0: a number in ``[0, 1]``, or a time
            such as ``"0.6dur"``.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range.

    Example:
        >>> StochasticDepth("ResNetBottleneck", drop_rate=0.1).find_unused_parameters
        True
    """

    target_layer_name: Any
    stochastic_method: str = attrs.field(default="block", validator=one_of("block", "sample"))
    drop_rate: float = number(0.2, 0, 1, meaning="It is a probability.")
    drop_distribution: str = attrs.field(default="linear", validator=one_of("linear", "uniform"))
    drop_warmup: float = attrs.field(default=0.0, converter=_to_drop_warmup, validator=FRACTION_OF_TRAINING)

    _warm: float | None = transient(default=None)  # the part of the rates that the blocks have

    _kernel: ClassVar = staticmethod(cf.apply_stochastic_depth)
    runs_at: ClassVar = dict.fromkeys((Event.INIT, Event.AFTER_LOAD, Event.BATCH_START), Stage.ARCHITECTURE)
    reads: ClassVar = {"model", "optimizers", "timestamp", "max_duration", "dataloader_len"}
    owns: ClassVar = owned(
        "the residual blocks",
        "A second one would find no plain blocks: pass all kinds of blocks to one, target_layer_name={...}.",
    )
    acts_in_training = True
    found_nothing: ClassVar = "{model} has no such block. Pass another name or class."

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, drop_rate=self.drop_rate == 0)

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return the events at which it runs: at each batch only if the rates warm up."""
        return self.runs_at if self.drop_warmup else {Event.INIT: Stage.ARCHITECTURE}

    @property
    def find_unused_parameters(self) -> bool:
        """Return whether blocks are skipped entirely, so that their parameters get no gradient."""
        return self.stochastic_method == "block"

    @property
    def draws_layers(self) -> bool:
        """Return whether each process draws which blocks it skips for its batch."""
        return self.stochastic_method == "block"

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the blocks, or update their drop rates."""
        if event is not Event.INIT:
            if event is Event.AFTER_LOAD and state.max_duration is None:
                return
            warm = min(1.0, elapsed_duration(self, state) / self.drop_warmup)
            # Most steps come after the warm-up, and the walk through a large model takes a millisecond.
            if warm != self._warm and cf.count_module_instances(state.model, cf.StochasticDepthBlock):
                cf.set_drop_rates(state.model, self.drop_rate * warm, self.drop_distribution)
            self._warm = warm
            return
        self._warm = None
        report = self.replace(state, logger)
        logger.log_metrics({"stochastic_depth/num_stochastic_layers": len(report)})  # the name in MosaicML Composer

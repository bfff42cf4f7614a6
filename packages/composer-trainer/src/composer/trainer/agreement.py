"""What all processes agree on: the arguments of a run; and of a batch its size, its time, and whether to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from composer.core.data_spec import has_own_functions
from composer.core.interval import Interval
from composer.distributed import all_gather_object
from composer.trainer.resume.state import SavesProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from composer.core import State
    from composer.distributed import BatchTotals, Parallelism
    from composer.trainer.data.batches import Batches

__all__ = ["Agreement", "check_same_run", "check_same_values"]

_SECONDS, _MOST_BATCHES = 0.25, 128
"""The time between two exchanges at most, if batches take as long as before, and the most batches without one."""


@attrs.define
class Agreement:
    """The counts of each batch in all processes, the same in each of them.

    In general the processes exchange their counts in each batch. Where they are certain, most batches need no exchange,
    which takes longer than a step of a small model: if a ``DistributedSampler`` gives each process as many samples,
    which torch's default ``collate_fn`` makes a batch, the ``DataSpec`` has no functions of its own, no algorithm
    removes samples, and no tokens are counted. Each exchange decides how many batches follow without one: up to twice
    as many as before it, 128 at most, and none if batches take longer than an eighth of a second. Only then a process
    learns that another was asked to stop.

    Args:
        state: The run.
        batches: The data.
        parallel: Exchanges the counts.
        elapsed: Returns the microseconds of training since its last call.
        weighs_tokens: Whether microbatches are weighted by their tokens instead of their samples.

    Attributes:
        totals: The totals of the last finished batch.
        seconds: The seconds by which it advanced the clock.
    """

    _state: State
    _batches: Batches
    _parallel: Parallelism
    _elapsed: Callable[[], int]
    _weighs_tokens: bool
    totals: BatchTotals = attrs.field(init=False)
    seconds: float = attrs.field(init=False, default=0.0)
    _counts: bool = attrs.field(init=False, default=True)
    _exchanges: bool = attrs.field(init=False, default=True)
    _logs: bool = attrs.field(init=False, default=False)
    _microbatches: int = attrs.field(init=False, default=1)
    _left: int = attrs.field(init=False, default=0)
    _own_seconds: float = attrs.field(init=False, default=0.0)
    _since: int = attrs.field(init=False, default=0)
    _pace: float = attrs.field(init=False, default=0.0)
    _estimated: float = attrs.field(init=False, default=0.0)
    _ahead: float = attrs.field(init=False, default=0.0)

    def _is_certain(self) -> bool:
        return self._batches.is_full and not (
            has_own_functions(self._batches.spec)
            or self._weighs_tokens
            or self._state.auto_microbatching
            or any(algorithm.selects_samples for algorithm in self._state.algorithms)
        )

    def begin_batch(self, counts: bool) -> None:
        """Decide whether the processes exchange the counts of the next batch.

        Args:
            counts: Whether this process's samples and tokens advance the clock, or others count them.
        """
        self._counts = counts
        self._since += 1
        self._exchanges = not self._left or not self._batches.is_full
        if self._exchanges:
            self._own_seconds = self._elapsed() / 1e6
        else:
            self._left -= 1

    def begin_gradients(
        self, samples: int, tokens: int, counted: int, *, microbatches: int, stop: bool, logs: bool
    ) -> float:
        """Send the counts of this process, and return the weight of its loss.

        Args:
            samples: Number of samples; 0 is sent if they do not count in this batch.
            tokens: Number of tokens; as well.
            counted: Number of samples or tokens that the loss is the mean of, after algorithms have run.
            microbatches: Number of microbatches.
            stop: Whether to stop after a batch.
            logs: Whether this process logs losses.

        Raises:
            RuntimeError: The counts are not those that the other processes rely on.
        """
        if not self._counts:
            samples = tokens = 0
        usual = None if self._weighs_tokens else self._batches.usual_samples
        is_usual = samples == counted == usual and not tokens
        if self._exchanges:
            self._parallel.begin_batch(
                samples,
                tokens,
                counted=counted,
                usual=usual,
                microbatches=microbatches,
                seconds=self._own_seconds,
                stop=stop,
                logs=logs,
                is_certain=is_usual and self._is_certain(),
            )
            return self._parallel.weight()
        if not is_usual:
            raise RuntimeError(
                f"train_dataloader has batches of {usual} samples, from which none were removed so far, but this one "
                f"has {samples} samples and {tokens} tokens, and {counted} remain after algorithms and callbacks. The "
                "other processes could not know. Give DataSpec(loader, get_num_samples_in_batch=...), or let the "
                "property selects_samples of an algorithm that removes samples return True."
            )
        self._parallel.expect_batch(samples, microbatches=max(microbatches, self._microbatches), logs=self._logs)
        return 1.0

    def finish_batch(self) -> BatchTotals:
        """Set the totals of the batch and its seconds, and return the totals."""
        self.totals = totals = self._parallel.totals()
        if not self._exchanges:
            # Counted with the pace of the batches before the last exchange, unless the clock is ahead of them.
            self._estimated += self._pace
            self.seconds = max(0.0, self._estimated - self._ahead)
            self._ahead += self.seconds
            return totals
        missing, self._estimated = totals.seconds - self._ahead, 0.0
        self.seconds, self._ahead = max(0.0, missing), max(0.0, -missing)
        self._pace = totals.seconds / self._since
        self._logs, self._microbatches = totals.logs, totals.microbatches
        # At most twice as many as were just measured: a few fast batches do not decide about many slow ones.
        most = min(2 * (self._since - 1) or 1, _MOST_BATCHES) if totals.is_certain else 0
        self._left = min(max(0, int(_SECONDS / self._pace) - 1), most) if self._pace else 0
        self._since = 0
        return totals


def check_same_run(state: State) -> None:
    """Refuse runs that differ between processes: they would wait for each other forever, or train other weights.

    All processes must call it.

    Raises:
        ValueError: The duration, the evaluators, the algorithms, the optimizers or the intervals of saving differ.
    """
    savers = [callback for callback in state.callbacks if isinstance(callback, SavesProgress)]
    check_same_values(
        {
            "max_duration": str(state.max_duration),
            "eval_dataloader": [evaluator.label for evaluator in state.evaluators],
            "algorithms": [state.component_key(algorithm) for algorithm in state.algorithms],
            "optimizers": [_settings_of(optimizer) for optimizer in state.optimizers],
            "save_folder and save_interval": [_interval_of(saver) for saver in savers],
        }
    )


def check_same_values(values: Mapping[str, Any]) -> None:
    """Refuse arguments that differ between processes.

    All processes must call it.

    Args:
        values: Plain data by the names of the arguments.

    Raises:
        ValueError: A value differs.
    """
    by_rank = all_gather_object(values)
    for rank, other in enumerate(by_rank):
        for name, value in by_rank[0].items():
            if other[name] != value:
                raise ValueError(
                    f"{name} must be the same in every process, got {value} in process 0 and {other[name]} in process "
                    f"{rank}. Construct the Trainer and call fit() with the same arguments, whatever the rank."
                )


def _settings_of(optimizer: Any) -> str:
    """Return an optimizer's class and the numbers of its parameter groups."""
    kinds = (bool, int, float, str)
    groups = [{name: one for name, one in group.items() if isinstance(one, kinds)} for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} with {groups}"


def _interval_of(saver: SavesProgress) -> str:
    interval = getattr(saver, "save_interval", None)
    return f"every {interval.every}" if isinstance(interval, Interval) else "at own times"

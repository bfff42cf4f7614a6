"""The arguments of a trainer in groups: each checks its own, and :class:`Settings` that none contradicts another.

The signature of the trainer declares each argument, and the field of its name in a group is the place of its use.
"""

from __future__ import annotations

import datetime
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import attrs
from attrs.validators import optional
from torch import nn
from torch.optim import Optimizer

from composer.checkpoint.contents import reject_fsdp1
from composer.checkpoint.saver import CheckpointSaver
from composer.core import Algorithm, AlgorithmPass, Callback, Interval, LoggerDestination, State, Time
from composer.core.checks import as_list, by_name, check_run_name, is_flag, is_string, own_arguments
from composer.distributed import (
    Parallelism,
    check_timeout,
    from_rank_zero,
    get_data_rank,
    get_global_rank,
    get_world_size,
)
from composer.distributed.collectives import all_gather_data
from composer.distributed.meta import is_on_meta
from composer.foreign.fsdp1 import translate_sections
from composer.loggers import ConsoleLogger, ProgressBarLogger
from composer.trainer.data.settings import TrainingData, check_model, check_trainable
from composer.trainer.evaluation.evaluate import Evaluations, check_can_be_evaluated
from composer.trainer.optimization import check_optimizers, make_scaler
from composer.trainer.reproducibility import choose_seed, seed_all
from composer.trainer.schedules import TrainingSchedule, check_optimizers_of
from composer.trainer.settings.checkpoints import Loading, Saving
from composer.trainer.settings.compute import Compute


def _check_profiler(name: str, profiler: object) -> None:
    if profiler is not None and not isinstance(profiler, Callback):
        raise TypeError(f"{name} must be a callback such as composer.profiler.Profiler, got {profiler!r}.")


def _check_log_level(name: str, level: object) -> None:
    levels = logging.getLevelNamesMapping()
    if level is not None and (not isinstance(level, str) or level.upper() not in levels):
        raise ValueError(f"{name} must be one of {', '.join(levels)}, got {level!r}.")


def _listed(components: object) -> Any:
    """Return an iterator as a list, because it is used several times."""
    return list(components) if isinstance(components, Iterator) else components


@attrs.frozen
class Components:
    """The model and the objects that take part in its training."""

    model: nn.Module = attrs.field(validator=lambda _, __, model: check_model(model))
    algorithms: Algorithm | Sequence[Algorithm] | None = attrs.field(converter=_listed)
    algorithm_passes: AlgorithmPass | Sequence[AlgorithmPass | tuple[AlgorithmPass, int]] | None
    optimizers: Optimizer | Sequence[Optimizer] | None = attrs.field(converter=_listed)
    callbacks: Callback | Sequence[Callback] | None = attrs.field(converter=_listed)
    loggers: LoggerDestination | Sequence[LoggerDestination] | None = attrs.field(converter=_listed)
    profiler: Callback | None = attrs.field(validator=by_name(_check_profiler))


@attrs.frozen
class Identity:
    """The name and the seed of a run.

    Attributes:
        found_name: The given name, or that of the environment; None if there is neither.
        run_name: This name, or one made of the time.
        seed: The given seed, or a random one.
    """

    _run_name: str | None = attrs.field(validator=optional(is_string))
    _seed: int | None
    found_name: str | None = attrs.field(init=False)
    run_name: str = attrs.field(init=False, validator=lambda _, __, name: check_run_name(name))
    seed: int = attrs.field(init=False)

    @found_name.default
    def _find_name(self) -> str | None:
        environment = os.environ.get("COMPOSER_RUN_NAME") or os.environ.get("RUN_NAME") or None
        return environment if self._run_name is None else self._run_name

    @run_name.default
    def _choose_name(self) -> str:
        # Two runs may start in the same second, and a name must not be drawn from a seeded generator.
        generated = f"{datetime.datetime.now(tz=datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        return generated if self.found_name is None else self.found_name

    @seed.default
    def _choose_seed(self) -> int:
        return choose_seed(self._seed)


@attrs.frozen
class Console:
    """What the first process shows of a run, and whether loggers receive the arguments."""

    progress_bar: bool = attrs.field(validator=is_flag)
    log_to_console: bool = attrs.field(validator=is_flag)
    console_stream: str | TextIO
    console_log_interval: int | str | Time = attrs.field(validator=by_name(Interval.named))
    log_traces: bool = attrs.field(validator=is_flag)
    auto_log_hparams: bool = attrs.field(validator=is_flag)
    python_log_level: str | None = attrs.field(validator=by_name(_check_log_level))

    def make_displays(self) -> list[LoggerDestination]:
        """Return the progress bar and the lines of text; nothing in other processes than the first."""
        if get_global_rank():
            return []
        stream, log_traces, every = self.console_stream, self.log_traces, self.console_log_interval
        displays: list[LoggerDestination] = []
        if self.progress_bar:
            displays.append(ProgressBarLogger(stream=stream, log_traces=log_traces))
        if self.log_to_console:
            displays.append(ConsoleLogger(log_interval=every, stream=stream, log_traces=log_traces))
        return displays

    def set_log_level(self) -> None:
        """Show the library's log records from ``python_log_level`` on; None changes nothing."""
        if self.python_log_level is None:
            return
        log = logging.getLogger("composer")
        log.setLevel(self.python_log_level.upper())
        if not log.handlers and not logging.getLogger().handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            log.addHandler(handler)


@attrs.frozen
class Processes:
    """How several processes train one model.

    Attributes:
        parallel: Runs the model in all of them.
    """

    parallelism_config: Mapping[str, Any] | None
    dist_timeout: float = attrs.field(validator=lambda _, __, timeout: check_timeout(timeout))
    ddp_sync_strategy: str | None
    parallel: Parallelism = attrs.field(init=False)

    @parallel.default
    def _make_parallel(self) -> Parallelism:
        return Parallelism(translate_sections(self.parallelism_config), self.ddp_sync_strategy)


@attrs.frozen
class Settings:
    """All arguments of a trainer."""

    components: Components
    data: TrainingData
    schedule: TrainingSchedule
    evaluations: Evaluations
    identity: Identity
    console: Console
    loading: Loading
    saving: Saving
    compute: Compute
    processes: Processes

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Settings:
        """Return the settings with the arguments of the constructor by name, of which each group has its own."""
        groups: tuple[Any, ...] = (
            Components, TrainingData, TrainingSchedule, Evaluations, Identity, Console, Loading, Saving, Compute,
            Processes,
        )  # fmt: skip
        return cls(*[group(**own_arguments(group, arguments)) for group in groups])

    def make_observers(self) -> tuple[Sequence[Callback], Sequence[LoggerDestination]]:
        """Return the callbacks that save checkpoints and the displays in the terminal, if all arguments fit together.

        Raises:
            TypeError: An argument is of the wrong kind.
            ValueError: Two arguments contradict each other.
        """
        model, parallel, labels = self.components.model, self.processes.parallel, self.evaluations.labels()
        optimizers, callbacks = as_list(self.components.optimizers), as_list(self.components.callbacks)
        if self.data.spec is not None:
            check_trainable(model)
        if labels:
            check_can_be_evaluated(model)
        savers = self.saving.make_savers(model, labels, autoresume=self.loading.autoresume)
        if savers or self.loading.is_given() or any(isinstance(one, CheckpointSaver) for one in callbacks):
            reject_fsdp1(model)
        self.loading.check(self.saving.save_folder, has_name=self.identity.found_name is not None)
        parallel.config.check_microbatch_size(self.compute.microbatch_size, model)
        parallel.config.check_has_data(model)
        displays = self.console.make_displays()
        if self.components.optimizers is not None:
            check_optimizers(model, optimizers)
        check_optimizers_of(self.schedule.schedulers, optimizers)
        return savers, displays

    def make_state(self) -> State:
        """Seed the global generators, move the model to the device, and return the state of the run.

        All processes get the first one's seed and name.
        """
        model, device = self.components.model, self.compute.device
        seed, run_name = from_rank_zero(self.identity.seed), from_rank_zero(self.identity.run_name)
        # Processes of a tensor-parallel group have the same samples, and draw the same numbers.
        seed_all((seed + get_data_rank()) % 2**32)
        if not is_on_meta(model):
            model.to(device)
        return State(
            model=model,
            rank_zero_seed=seed,
            run_name=run_name,
            device=device,
            max_duration=self.schedule.max_duration,
            precision=self.compute.precision,
            scaler=make_scaler(self.compute.precision, device),
            data_rank=get_data_rank(),
            gather=all_gather_data if get_world_size() > 1 else None,
        )

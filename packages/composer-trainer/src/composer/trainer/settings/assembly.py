"""The parts that a trainer consists of: created from its settings, and closed once.

:class:`Assembly` creates the parts, runs the events of the construction (``INIT``, ``BEFORE_LOAD``, ``AFTER_LOAD``),
and closes what is open. ``Trainer``, its only child, has the public methods. The order of the constructor matters: all
settings are checked before anything has an effect, seeds and process groups come before the state, and the state before
what refers to it. ``fit`` changes the settings in use: ``_data``, ``_schedule`` and ``_evaluations``.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composer.core import Engine, Event, Logger, Precision
from composer.core.checks import as_list
from composer.distributed import all_gather_object, broadcast_model, from_rank_zero, initialize_dist
from composer.distributed.meta import is_on_meta
from composer.foreign.pt_files import let_savers_write_files
from composer.functional.dtensors import is_sharded
from composer.loggers.fits import Fits
from composer.loggers.hyperparameters import hyperparameters, plain_settings
from composer.trainer.optimization import default_optimizer, move_state
from composer.trainer.reproducibility import configure_deterministic_mode
from composer.trainer.resume.state import ResumeState
from composer.trainer.settings.compute import check_microbatch_size
from composer.trainer.stopping import agree_on_stop

if TYPE_CHECKING:
    from composer.trainer.settings.groups import Settings
    from composer.trainer.stopping import StopSignals


class Assembly:
    """The parts of a training: its state, engine and logger, the data, and what decides how they are used.

    Args:
        settings: The arguments of the trainer.
        given: Those to log: which are not defaults.
        dry_run: The number of batches of each kind in a dry run, else 0.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: Two arguments contradict each other, or two algorithms cannot work together.
    """

    def __init__(self, settings: Settings, given: Mapping[str, Any], dry_run: int) -> None:
        components, compute, model = settings.components, settings.compute, settings.components.model
        # All arguments are checked before anything has an effect: seeds, process groups, files of loggers.
        savers, displays = settings.make_observers()
        settings.console.set_log_level()
        self._data, self._evaluations, self._compute = settings.data, settings.evaluations, compute
        self._parallel, self._schedule, self._dry_run = settings.processes.parallel, settings.schedule, dry_run
        if compute.is_deterministic:
            configure_deterministic_mode()
        self._parallel.activate()
        initialize_dist(compute.device, settings.processes.dist_timeout)
        check_same_precision(compute.precision)
        self.local_hparams, self._fits = plain_settings(given), Fits(given.get("seed"))
        self.state = settings.make_state()
        optimizers = as_list(components.optimizers)
        # A model without parameters can be evaluated, and needs no optimizer.
        self._has_default_optimizer = components.optimizers is None and any(True for _ in model.parameters())
        if self._has_default_optimizer:
            optimizers = [default_optimizer(model)]
        self.state.optimizers = optimizers
        for optimizer in optimizers:
            move_state(optimizer)
        self._set_microbatch_size(compute.microbatch_size)
        self.state.algorithms = as_list(components.algorithms)
        self.state.callbacks = [*as_list(components.callbacks), *as_list(components.profiler), *savers]
        self.state.profiler = components.profiler
        self.logger = Logger(self.state, [*as_list(components.loggers), *displays])
        passes, log_traces = components.algorithm_passes, settings.console.log_traces
        self.engine: Engine = Engine(self.state, self.logger, passes, log_traces=log_traces)
        # Only a model that declares the attribute; 0 replaces a missing one, as None is what a model declares.
        if isinstance(getattr(model, "logger", 0), Logger | None):
            model.logger = self.logger  # type: ignore[assignment]  # no parameter or module
        self._data.install(self.state)
        self._schedule.check_phases(copy.copy(self.state), self.state.max_duration)
        self._evaluations.install(self.state)
        schedulers = self._schedule.schedulers
        self._resume_state = ResumeState(self.state, self._data, self.logger, given.get("seed"), schedulers)
        # From INIT on, loggers have open files and runs. A strong reference would keep what callbacks refer to.
        weakref.finalize(self, lambda close: (close() or bool)(), weakref.WeakMethod(self.engine.close))
        with self._closing_on_error():
            self._initialize(settings)
        if dry_run:
            # After its one short epoch.
            reason = f"fast_dev_run={dry_run} is complete"
            self.engine.on("epoch_checkpoint", lambda state, _: state.stop_training(reason))

    def _initialize(self, settings: Settings) -> None:
        """Run the events of the construction, load what the run starts from, and log the hyperparameters."""
        state = self.state
        self.engine.run_event(Event.INIT)
        # After INIT, so that the linear layers which algorithms have inserted are converted, too.
        self._compute.prepare(state.model)
        self._parallel.compile_config = self._compute.compile_config
        self.engine.run_event(Event.BEFORE_LOAD)
        # Loggers have added the URLs of copies.
        let_savers_write_files(state, is_split=self._parallel.config.splits_model)
        if is_on_meta(state.model):
            self._parallel.prepare(state)  # sharded before it is loaded, so that no process has the complete model
        if from_rank_zero(settings.loading.is_given()):
            self._schedule.prepare_schedulers(state)
            passes, seed = settings.components.algorithm_passes, state.rank_zero_seed
            settings.loading.load(self.engine, self._resume_state, passes, settings.saving.save_folder)
            if state.rank_zero_seed != seed:  # that of the saved run, on which the order of the data depends
                self._data.install(state)
            elif self._data.batches is not None:
                self._data.batches.rewind(int(state.timestamp.epoch))
        self.engine.run_event(Event.AFTER_LOAD)
        agree_on_stop(state)
        # The processes may have drawn different weights.
        if not is_sharded(state.model):
            broadcast_model(state.model)
        # A model that is split is compiled block by block when it is split.
        if not self._parallel.config.splits_model:
            self._compute.compile(state.model)
        if loggers := self.logger.destinations:
            extra = self.local_hparams if settings.console.auto_log_hparams else None
            schedulers = self._schedule.schedulers
            described = hyperparameters(state, loggers=loggers, schedulers=schedulers, extra=extra)
            self.logger.log_hyperparameters(described)

    def _close(self, *, may_evaluate: bool = False) -> None:
        try:
            if self._data.batches is not None:
                self._data.batches.close()
        finally:
            self.engine.close(may_evaluate=may_evaluate)
        if getattr(self.state.model, "logger", None) is self.logger:
            self.state.model.logger = None

    def _check_microbatch_size(self, size: int | str | None) -> None:
        check_microbatch_size("device_train_microbatch_size", size)
        self._parallel.config.check_microbatch_size(size, self.state.model)

    def _set_microbatch_size(self, size: int | str | None) -> None:
        self.state.auto_microbatching = size == "auto"
        self.state.device_train_microbatch_size = size if isinstance(size, int) else None

    @contextlib.contextmanager
    def _stopped_by(self, signals: StopSignals) -> Iterator[StopSignals]:
        """Let signals stop the block; after Ctrl-C nothing is closed until the trainer, or the program, ends."""
        with self._closing_on_error(signals), signals:
            yield signals

    @contextlib.contextmanager
    def _closing_on_error(self, signals: StopSignals | None = None) -> Iterator[None]:
        """Close callbacks and loggers after an error."""
        self._parallel.activate()  # another run of this process may have another mesh
        try:
            yield
        except BaseException as error:
            if signals is None or not (isinstance(error, KeyboardInterrupt) and signals.has_stopped):
                with self._noting_further_errors(error):
                    self._close(may_evaluate=not isinstance(error, SystemExit))
            raise

    @contextlib.contextmanager
    def _noting_further_errors(self, first: BaseException | None) -> Iterator[None]:
        """Add an error that is raised while closing to the first one as a note, instead of hiding it."""
        try:
            yield
        except Exception as second:
            if first is None:
                raise
            first.add_note(f"Closing callbacks and loggers failed, too: {type(second).__name__}: {second}")


def check_same_precision(precision: Precision) -> None:
    """Reject a precision that differs between processes; all must call it.

    Raises:
        ValueError: The precision of another process differs from that of the first one.
    """
    by_rank = [str(one) for one in all_gather_object(precision)]
    if len({*by_rank}) > 1:
        raise ValueError(f"precision must be the same in every process, got {', '.join(by_rank)} by rank.")

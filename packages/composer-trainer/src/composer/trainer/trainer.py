"""The trainer: its arguments, and the methods that train, evaluate, predict and export.

``Assembly``, the base class, makes the parts of the settings, which live as long as the Trainer. :meth:`Trainer.fit`
checks its arguments (1), makes them the settings in use (2), and trains with a ``Run``, which lasts for the call (3).
The constructor and ``fit`` pass their arguments by name to the classes that declare them, as fields of the same names:
``own_arguments`` of ``core/checks.py`` takes those of a class, in ``settings/groups.py``, ``changed`` of data and
schedule, and ``with_changes`` of evaluations.
"""

from __future__ import annotations

import copy
import os
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from composer.checkpoint.saver import CheckpointSaver
from composer.checkpoint.saving import save
from composer.core import (
    Algorithm,
    AlgorithmPass,
    Callback,
    Event,
    LoggerDestination,
    Precision,
    Time,
    Timestamp,
    ensure_data_spec,
    evaluation_weights,
)
from composer.distributed.samplers import split_data
from composer.export.inference import Transform, export_for_inference
from composer.foreign.pt_files import SUFFIX, let_savers_write_files, save_as_file
from composer.functional.checks import check_flags, check_subset
from composer.loggers.hyperparameters import given_arguments
from composer.loggers.interruption import report_interruption
from composer.trainer.cooldown import cooled_down, scaled_lengths
from composer.trainer.data.batches import batch_to_export
from composer.trainer.data.settings import check_trainable
from composer.trainer.evaluation.evaluate import (
    EvalData,
    EvalInterval,
    Loader,
    check_can_be_evaluated,
    check_labels,
    evaluate,
    predict,
    prepare_metrics,
    split_evaluators,
    to_evaluators,
)
from composer.trainer.loop import train
from composer.trainer.optimization import Optimization, change_precision, check_precision, warn_of_default_optimizer
from composer.trainer.result import FitResult, final_metrics, reason_of_end
from composer.trainer.run import Run
from composer.trainer.schedules import SchedulerLike, check_optimizers_of
from composer.trainer.settings.assembly import Assembly
from composer.trainer.settings.compute import choose_precision
from composer.trainer.settings.groups import Settings
from composer.trainer.stopping import StopSignals
from composer.trainer.tools.dry_run import check_dry_run, dry_run_settings, short_evaluators
from composer.trainer.tools.environment import warn_of_mosaicml
from composer.trainer.tools.names import missing_attribute, suggests_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from composer.checkpoint import KeepBest
    from composer.checkpoint.contents import IgnoreKeys
    from composer.checkpoint.saver import SaveInterval


class Trainer(Assembly):
    """Trains a model with algorithms, callbacks and loggers, in one process or in several started by torchrun.

    The constructor creates all parts and runs ``INIT`` (where algorithms change the model). :meth:`fit` trains,
    :meth:`eval` evaluates, :meth:`predict` returns outputs, and :meth:`close` closes callbacks and loggers, as the end
    of ``with Trainer(…) as trainer:`` does. ``print(trainer.engine.explain())`` shows what runs at which event.

    The order of the data, and the randomness in its samples, depend only on the seed and the epoch. For that a
    ``DataLoader`` is copied, and its order differs from that of a hand-written loop.

    Args:
        model: A module with ``forward(batch)`` and ``loss(outputs, batch)``, such as a
            :class:`~composer.models.ComposerModel`; to be evaluated it also needs ``eval_forward``, ``get_metrics`` and
            ``update_metric``.
        train_dataloader: The data: an iterable of batches or a :class:`~composer.core.DataSpec`. May be given to
            :meth:`fit` instead.
        train_dataloader_label: Its name in logs.
        train_subset_num_batches: Batches in an epoch, if not all of them (-1).
        spin_dataloaders: Whether a loader that cannot start in the middle of an epoch is fast-forwarded to the resume
            point; else it starts at the beginning of the epoch.
        max_duration: How long to train: a time, a string (``"10ep"``, ``"500ba"``, ``"30min"``) or a number of epochs.
            With an endless loader, use batches, samples, tokens or seconds, or set ``train_subset_num_batches``.
        algorithms: One or several; the engine puts them in order.
        algorithm_passes: Functions that change this order; see :data:`composer.core.AlgorithmPass`.
        optimizers: One or several; if None, ``DecoupledSGDW`` with a learning rate of 0.1, with a warning.
        schedulers: torch's schedulers or functions ``f(state, ssr) -> multiplier``: one function for all optimizers, or
            one for each in their order.
        scale_schedule_ratio: The factor by which the duration and the schedule are scaled; 0.5 trains half as long.
        step_schedulers_every_batch: Whether schedulers step after each batch; if None, torch's own step after each
            epoch and functions after each batch.
        eval_dataloader: The data to evaluate on: a loader, an :class:`~composer.core.Evaluator`, or several evaluators.
        eval_interval: How often; a whole number counts epochs, 0 is never.
        eval_subset_num_batches: Batches of an evaluation, if not all of them (-1).
        callbacks: One or several.
        loggers: Destinations of metrics, one or several.
        run_name: The run's name. If None, it is the environment variable ``COMPOSER_RUN_NAME`` or ``RUN_NAME``, or
            generated from the current time.
        progress_bar: Whether to draw a progress bar.
        log_to_console: Whether to print metrics as lines of text.
        console_stream: The stream of both: ``"stderr"``, ``"stdout"`` or an open text file.
        console_log_interval: How often lines are printed.
        log_traces: Whether to log which algorithms ran at which event.
        auto_log_hparams: Whether to log the arguments of this call that are not defaults, too; the settings of
            components are always logged.
        load_path: The checkpoint to start from: its folder, URL or ``.pt`` file, or ``"latest"`` for the newest in
            ``save_folder``; with ``load_weights_only`` also a file of weights. Resumed runs are bit-identical.
        load_weights_only: Whether only the model's weights are loaded: those for evaluation, such as EMA's averages.
        load_strict_model_weights: Whether missing or unexpected weights raise an error, or a warning.
        load_ignore_keys: The parts not to load; see :func:`composer.checkpoint.load_checkpoint`.
        load_exclude_algorithms: Algorithms not to reconstruct, though the saved weights require them.
        save_folder: The path or URL to save checkpoints to; None saves none. ``{run_name}`` is replaced.
        save_filename: A checkpoint's name there. If it ends in ``.pt``, it is a file that ``torch.load`` reads,
            unless the model is split over processes, or saved or copied to a URL.
        save_latest_filename: The name of a link to the newest one. If it ends in ``.pt``, so does the default name of
            checkpoints. Beside such files, the link ``latest`` has one more, ``latest-rank0.pt``.
        save_overwrite: Whether to replace checkpoints of other runs.
        save_interval: How often: a time, a string, a number of epochs, or a function ``f(state, event) -> bool``.
        save_weights_only: Whether only the model's evaluation weights are saved.
        save_ignore_keys: The parts not to save.
        save_num_checkpoints_to_keep: The number of newest checkpoints to keep; -1 keeps all.
        save_best: A metric, ``"eval/MulticlassAccuracy"``: a new best value is saved at once and kept, and the link
            ``best`` in ``save_folder`` points to it. For several, a :class:`~composer.checkpoint.KeepBest`.
        save_metrics: Accepted for compatibility: the states of the training metrics are always saved.
        autoresume: Whether to resume from the newest valid checkpoint of ``run_name`` in ``save_folder`` and its
            copies, without the ``load_`` arguments: the same program can be restarted until the training is complete.
        device: ``"cpu"``, ``"gpu"``, ``"mps"`` or a :class:`torch.device`; the best available if None.
        precision: ``"fp32"``, ``"amp_bf16"``, ``"amp_fp16"`` or ``"amp_fp8"``; if None, ``"amp_fp16"`` on a GPU and
            ``"fp32"`` elsewhere.
        precision_config: For ``"amp_fp8"``: settings of torchao's ``Float8LinearConfig``, or ``{"recipe": name}``.
        device_train_microbatch_size: The number of samples in one forward pass; gradients of a batch's microbatches
            are summed. None uses complete batches, ``"auto"`` finds the largest size that fits into memory.
        accumulate_train_batch_on_tokens: Whether microbatches are weighted by their tokens instead of their samples.
        seed: Seeds all global generators; random if None. For equal weights, seed before creating the model.
        deterministic_mode: Whether to allow only deterministic algorithms of torch.
        parallelism_config: How the model is run in several processes: None or ``{"ddp": {...}}`` puts a copy into each,
            ``{"fsdp": {...}}`` shards it, ``{"mesh": {...}}`` also with tensor parallelism; see
            :class:`composer.distributed.Parallelism`.
        dist_timeout: Seconds that a process waits for the others before it raises an error.
        ddp_sync_strategy: When gradients are summed; see :class:`composer.distributed.DDPSyncStrategy`.
        profiler: A callback that records where time is spent, a :class:`composer.profiler.Profiler`.
        python_log_level: What of ``logging.getLogger("composer")`` is shown: ``"INFO"``, ``"DEBUG"``, …
        compile_config: Arguments of ``model.compile()``, ``{}`` for its defaults; None does not compile. The names of
            the weights do not change.
        fast_dev_run: A number of batches for a dry run, 1 if True. :meth:`fit` ends after an epoch of so many batches
            and an evaluation of so many; nothing is saved; ``loggers``, ``profiler`` and ``autoresume`` are ignored; of
            ``load_path`` only the weights are loaded.

    Raises:
        TypeError: An argument is of the wrong kind. Flags accept only True and False.
        ValueError: A value is out of range, two algorithms cannot work together, or the device does not exist.

    Example:
        >>> import torch
        >>> from composer.models import ComposerClassifier
        >>> images, labels = torch.rand(32, 4), torch.randint(2, (32,))
        >>> model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
        >>> trainer = Trainer(
        ...     model=model,
        ...     train_dataloader=[(images, labels)],
        ...     optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     max_duration="3ep",
        ...     progress_bar=False,
        ... )
        >>> result = trainer.fit()
        >>> result.steps, result.reason
        (3, "max_duration='3ep' is reached")
    """

    @suggests_names
    def __init__(
        self,
        *,
        model: nn.Module,
        train_dataloader: Loader | None = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int = -1,
        spin_dataloaders: bool = True,
        max_duration: int | str | Time | None = None,
        algorithms: Algorithm | Sequence[Algorithm] | None = None,
        algorithm_passes: AlgorithmPass | Sequence[AlgorithmPass | tuple[AlgorithmPass, int]] | None = None,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
        schedulers: SchedulerLike | Sequence[SchedulerLike] | None = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: EvalData | None = None,
        eval_interval: EvalInterval = 1,
        eval_subset_num_batches: int = -1,
        callbacks: Callback | Sequence[Callback] | None = None,
        loggers: LoggerDestination | Sequence[LoggerDestination] | None = None,
        run_name: str | None = None,
        progress_bar: bool = True,
        log_to_console: bool = False,
        console_stream: str | TextIO = "stderr",
        console_log_interval: int | str | Time = "1ba",
        log_traces: bool = False,
        auto_log_hparams: bool = True,
        load_path: str | os.PathLike[str] | None = None,
        load_weights_only: bool = False,
        load_strict_model_weights: bool = True,
        load_ignore_keys: IgnoreKeys = None,
        load_exclude_algorithms: str | Sequence[str] | None = None,
        save_folder: str | None = None,
        save_filename: str = "ep{epoch}-ba{batch}",
        save_latest_filename: str | None = "latest",
        save_overwrite: bool = False,
        save_interval: SaveInterval = "1ep",
        save_weights_only: bool = False,
        save_ignore_keys: IgnoreKeys = None,
        save_num_checkpoints_to_keep: int = -1,
        save_best: str | KeepBest | None = None,
        save_metrics: bool = False,
        autoresume: bool | None = False,
        device: str | torch.device | None = None,
        precision: str | Precision | None = None,
        precision_config: Mapping[str, Any] | None = None,
        device_train_microbatch_size: int | str | None = None,
        accumulate_train_batch_on_tokens: bool = False,
        seed: int | None = None,
        deterministic_mode: bool = False,
        parallelism_config: Mapping[str, Any] | None = None,
        dist_timeout: float = 300.0,
        ddp_sync_strategy: str | None = None,
        profiler: Callback | None = None,
        python_log_level: str | None = None,
        compile_config: Mapping[str, Any] | None = None,
        fast_dev_run: int = 0,
    ) -> None:
        warn_of_mosaicml()
        arguments = dict(locals())
        settings = Settings.of(arguments)
        dry_run = check_dry_run(fast_dev_run)
        settings = dry_run_settings(settings, dry_run) if dry_run else settings
        super().__init__(settings, given_arguments(Trainer, arguments), dry_run)

    if not TYPE_CHECKING:  # type checkers name what does not exist

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name)

    @suggests_names
    def fit(
        self,
        *,
        train_dataloader: Loader | None = None,
        train_dataloader_label: str | None = None,
        train_subset_num_batches: int | None = None,
        spin_dataloaders: bool | None = None,
        duration: int | str | Time | None = None,
        cooldown: int | str | Time | None = None,
        reset_time: bool = False,
        schedulers: SchedulerLike | Sequence[SchedulerLike] | None = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: EvalData | None = None,
        eval_subset_num_batches: int | None = None,
        eval_interval: EvalInterval | None = None,
        device_train_microbatch_size: int | str | None = None,
        precision: str | Precision | None = None,
    ) -> FitResult:
        """Train until ``max_duration``, or for ``duration`` or ``cooldown`` more.

        It calls ``model.train()``, but norms with running statistics that are frozen and in evaluation mode stay in it.
        A further call continues where the last one stopped. Arguments that are None keep the constructor's values. It
        returns immediately if training is already complete. An error closes callbacks and loggers; the trainer can then
        evaluate, predict and save without them. After Ctrl-C or SIGTERM the batch, also of an evaluation, is finished,
        callbacks run ``FIT_END``, and ``KeyboardInterrupt`` or ``SystemExit(143)``, which closes the trainer, is
        raised; a second Ctrl-C stops within the batch. What was due is done first by the next call, or after a resume.

        Args:
            train_dataloader: The data to train on.
            train_dataloader_label: Its name in logs.
            train_subset_num_batches: Batches in an epoch.
            spin_dataloaders: Whether a loader is fast-forwarded to the resume point.
            duration: How long to train from here, instead of until ``max_duration``.
            cooldown: The same, and the learning rate decays over it: that of a
                :class:`~composer.optim.WarmupStableDecayScheduler` in its stable phase. A run that resumes from a
                checkpoint of a cool-down completes it.
            reset_time: Whether to reset the clock.
            schedulers: The learning rate schedulers.
            scale_schedule_ratio: The factor by which ``duration`` and ``schedulers`` are scaled.
            step_schedulers_every_batch: Whether schedulers step after each batch.
            eval_dataloader: The data to evaluate on.
            eval_subset_num_batches: Batches of an evaluation.
            eval_interval: How often to evaluate.
            device_train_microbatch_size: The number of samples in one forward pass.
            precision: The precision.

        Returns:
            The final metrics, the time, the steps, why it ended, and the newest checkpoint. It prints as a table.

        Raises:
            ValueError: There is no data or no duration, or a value is out of range.
        """
        check_flags(reset_time=reset_time)
        if self._dry_run:
            train_subset_num_batches = self._dry_run
            eval_dataloader = None if eval_dataloader is None else short_evaluators(eval_dataloader, self._dry_run)
        # The arguments by name: data, schedule and evaluations each take those that their class declares.
        given = dict(locals())
        state, started_at = self.state, time.perf_counter()
        self.engine.check_open()
        self._parallel.activate()
        # 1. The checks of the arguments, so that a call which raises an error here changes nothing.
        check_trainable(state.model)
        if self._has_default_optimizer:
            warn_of_default_optimizer()
        self._check_microbatch_size(device_train_microbatch_size)
        new_precision = state.precision if precision is None else choose_precision(precision, state.device)
        check_precision(state, new_precision)
        own_duration, cooldown_length = scaled_lengths(duration, cooldown, scale_schedule_ratio)
        schedule = self._schedule.changed(given, own_duration)
        check_optimizers_of(schedule.schedulers, state.optimizers)
        data, evaluations = self._data.changed(given), self._evaluations.with_changes(given)
        check_labels(evaluations.evaluators, data.label)
        planned, former_cooldown = copy.copy(state), self._resume_state.cooldown
        if reset_time:
            planned.timestamp, former_cooldown = Timestamp(), None
            if state.stop_reason is not None:  # the duration is where the training was stopped
                planned.max_duration = schedule.max_duration or planned.max_duration
        schedule_in_use, new_cooldown = cooled_down(
            schedule, planned, cooldown_length, former_cooldown, anywhere=self._dry_run > 0
        )
        end = schedule.end(planned, own_duration) if new_cooldown is None else new_cooldown.end
        data.prepare(state, self._data)
        self._resume_state.check_data(None if reset_time else data.batches)
        data.select(planned)
        schedule_in_use.check_phases(planned, end)
        # 2. The arguments become the settings in use.
        evaluations.replace(self._evaluations, state)
        batches = self._data.take(data, state)
        if device_train_microbatch_size is not None:
            self._set_microbatch_size(device_train_microbatch_size)
        change_precision(state, new_precision)
        if reset_time:
            state.timestamp = state.previous_timestamp = planned.timestamp
            batches.rewind(epoch=0)
            self._resume_state.forget()
        self._schedule, self._evaluations = schedule, evaluations
        self._resume_state.cooldown, state.max_duration = new_cooldown, end
        schedule.end_of_part = schedule.end_of_part if own_duration is None else end
        if state.has_reached(end) and not (state.evaluators and self._resume_state.interrupted):
            return self._result(state.stop_reason or f"max_duration='{end}' was reached before", started_at)
        # 3. The training.
        optimization = Optimization(state, self._resume_state.skipped_steps)
        run = Run(
            self.engine, batches, optimization,
            schedules=schedule_in_use.take_schedulers(state), evaluations=self._evaluations,
            resume_state=self._resume_state, parallel=self._parallel, weighs_by_tokens=self._compute.weighs_by_tokens,
        )  # fmt: skip
        reason = self._train(run)
        steps = int(state.timestamp.batch) - int(planned.timestamp.batch)
        return self._result(reason, started_at, steps, run.losses)

    def _train(self, run: Run) -> str:
        """Train, and return why the training has ended."""
        run.follow_clock()
        self.engine.forget_plan()
        self._fits.begin(self.state, self._schedule.schedulers, run.past_losses)
        let_savers_write_files(self.state, is_split=self._parallel.config.splits_model)  # savers added since
        # torchrun sends a SIGTERM to the other processes when one has exited.
        with self._stopped_by(run.signals):
            train(run)
            self._fits.end(self.state, reason := reason_of_end(run))
            if run.signals.is_agreed:
                report_interruption(self.state, reason, self._savers)
            return reason

    def _result(
        self, reason: str, started_at: float, steps: int = 0, losses: Mapping[str, torch.Tensor] | None = None
    ) -> FitResult:
        return FitResult(
            self.state.run_name,
            reason,
            self.state.timestamp,
            steps,
            time.perf_counter() - started_at,
            final_metrics(self.state, losses or {}),
            next(reversed(self.saved_checkpoints), None),
            self.best_checkpoint,
            self.engine.explain().acted,
            self._fits.calls[-1] if steps else None,
            [type(one).__name__ for one in self.state.algorithms if one.evaluation_weights(self.state) is not None],
        )

    @suggests_names
    def eval(
        self, eval_dataloader: EvalData | None = None, subset_num_batches: int | None = None
    ) -> dict[str, dict[str, Any]]:
        """Evaluate now. Ctrl-C and SIGTERM end it after a batch, as they end :meth:`fit`. All processes must call it.

        Args:
            eval_dataloader: The data; the evaluators of the constructor if None.
            subset_num_batches: The number of batches of each, -1 for all; None uses the constructor's value.

        Returns:
            The metrics' values by evaluator and name, as tensors: ``{"eval": {"MulticlassAccuracy": tensor(0.99)}}``.

        Raises:
            ValueError: There is nothing to evaluate on, or processes would get the same samples.
        """
        subset = self._evaluations.subset_num_batches if subset_num_batches is None else subset_num_batches
        check_subset("eval_subset_num_batches", subset)
        given = None if eval_dataloader is None else to_evaluators(eval_dataloader)
        evaluators = self.state.evaluators if given is None else split_evaluators(given)
        if self._dry_run or subset_num_batches is not None:
            evaluators = short_evaluators(evaluators, self._dry_run or subset)
        if not evaluators:
            raise ValueError("There is nothing to evaluate on: give eval_dataloader to eval() or to the Trainer.")
        metrics, values = dict(self.state.eval_metrics), dict(self.state.eval_metric_values)
        if eval_dataloader is not None:
            check_can_be_evaluated(self.state.model)
            prepare_metrics(self.state, evaluators)
        try:
            with self._stopped_by(StopSignals()) as signals:
                self.engine.run_event(Event.EVAL_STANDALONE_START)
                results = evaluate(self.engine, evaluators, subset, signals)
                self.engine.run_event(Event.EVAL_STANDALONE_END)
        finally:
            self.state.eval_metrics |= metrics  # restores the metrics of labels that the given data used, too
            if eval_dataloader is not None:  # and their values, by which checkpoints are the best
                self.state.eval_metric_values |= {label: values[label] for label in metrics if label in values}
        return results

    @suggests_names
    def predict(
        self,
        dataloader: Loader,
        subset_num_batches: int = -1,
        *,
        return_outputs: bool = True,
        join: bool = False,
        with_targets: bool = False,
    ) -> Any:
        """Run the model over data; outputs are in ``state.outputs``. Signals end it as :meth:`eval`.

        All processes must call it.

        Args:
            dataloader: Batches as the model's ``eval_forward`` (or else ``forward``) takes them.
            subset_num_batches: The number of batches; -1 for all.
            return_outputs: Whether to collect the outputs; else only callbacks see them.
            join: Whether to return one result with a row for each sample; if their shapes differ, a list of samples.
            with_targets: Whether to return pairs of outputs and targets.

        Returns:
            A list with the outputs of each batch, on the CPU; empty unless ``return_outputs``. With ``join`` all as
            one. In several processes, among which a ``DataLoader`` without a sampler is split as by :meth:`eval`, each
            returns those of its own samples, every sample once: rank ``r`` of ``n`` the rows ``r, r + n, …``.

        Raises:
            TypeError: ``dataloader`` cannot be iterated over.
            KeyError: The batches have no targets.
            ValueError: ``subset_num_batches`` is out of range, or processes would get the same samples.
        """
        check_flags(return_outputs=return_outputs, join=join, with_targets=with_targets)
        check_subset("subset_num_batches", subset_num_batches)
        spec, subset = split_data(ensure_data_spec(dataloader), "dataloader"), self._dry_run or subset_num_batches
        with self._stopped_by(StopSignals()) as signals:
            collected = predict(self.engine, spec, subset, signals, collect=return_outputs, targets=with_targets)
        return collected.joined() if join else collected.outputs

    def export_for_inference(
        self,
        save_format: str,
        save_path: str | os.PathLike[str],
        *,
        sample_input: Any = None,
        transforms: Transform | Sequence[Transform] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> None:
        """Export the model with its evaluation weights to a file that needs neither this library nor the model's code.

        Args:
            save_format: ``"torchexport"`` or ``"onnx"``; see :func:`composer.export.export_for_inference`.
            save_path: The file, or a URL that fsspec supports.
            sample_input: A batch; if None, the first to evaluate or else to train on. It has no labels for a model of
                Transformers that is not an encoder and decoder.
            transforms: Functions that change a copy of the model before it is exported.
            input_names: Names of the inputs.
            output_names: Names of the outputs.

        Raises:
            ExportError: The model cannot be exported, or the exported model computes different outputs.
            ValueError: The format is unknown, or there is no batch but those of an iterator.
        """
        names: dict[str, Any] = {"input_names": input_names, "output_names": output_names}
        with evaluation_weights(self.state):
            sample = batch_to_export(self.state) if sample_input is None else sample_input
            export_for_inference(
                self.state.model, save_format, str(save_path), sample_input=sample, transforms=transforms, **names
            )

    @suggests_names
    def save_checkpoint(self, name: str = "ep{epoch}-ba{batch}", *, weights_only: bool = False) -> str:
        """Save a checkpoint and wait until it is written. All processes must call it.

        Args:
            name: Its folder or URL; ``{run_name}``, ``{epoch}``, ``{batch}`` and so on are filled in. It replaces a
                checkpoint of the name. One that ends in ``.pt`` is a file that ``torch.load`` reads, and replaces
                anything, unless the model is split over processes.
            weights_only: Whether only the evaluation weights are saved.

        Returns:
            Its path or URL.

        Raises:
            NotImplementedError: The model is wrapped by FSDP 1.
            CheckpointSaveError: The checkpoint could not be written.
        """
        check_flags(weights_only=weights_only)
        self._parallel.activate()
        extra = self._resume_state.data_to_save(weights_only=weights_only)
        save_as = save_as_file if str(name).endswith(SUFFIX) else save
        return save_as(self.state, os.fspath(name), extra, weights_only=weights_only, together=True, overwrite=True)

    @suggests_names
    def save_checkpoint_to_save_folder(self) -> None:
        """Save a checkpoint to ``save_folder``, as at ``save_interval``, and wait until it is written.

        All processes must call it.

        Raises:
            ValueError: The trainer has no ``save_folder``.
        """
        if not self._savers and not self._dry_run:
            raise ValueError("There is no folder to save to: give save_folder to the Trainer.")
        for saver in self._savers:
            saver._save_checkpoint(self.state, self.logger)  # noqa: SLF001  (which programs override)
            saver.wait()

    @property
    def _savers(self) -> list[CheckpointSaver]:
        return [callback for callback in self.state.callbacks if isinstance(callback, CheckpointSaver)]

    @property
    def saved_checkpoints(self) -> list[str]:
        """The paths of the checkpoints that this trainer has saved and not deleted, the oldest first."""
        return [path for saver in self._savers for path in saver.saved_checkpoints]

    @property
    def best_checkpoint(self) -> str | None:
        """The path of the best checkpoint by ``save_best``; None until one with a value of the metric is saved."""
        return next((saver.best_checkpoint for saver in self._savers if saver.best_checkpoint is not None), None)

    def close(self) -> None:
        """Close callbacks and loggers, once, and stop the loader's workers; the trainer cannot be used afterwards."""
        self._close()

    def __repr__(self) -> str:
        """Return what is trained and how far, in one line."""
        state, clock = self.state, self.state.timestamp
        num_parameters = sum(parameter.numel() for parameter in state.model.parameters())
        until = "" if state.max_duration is None else f" of max_duration='{state.max_duration}'"
        return (
            f"Trainer({type(state.model).__name__} with {num_parameters:,} parameters, run_name={state.run_name!r}, "
            f"device='{state.device}', at epoch {int(clock.epoch)}, batch {int(clock.batch)}{until})"
        )

    def _repr_html_(self) -> str:  # the method that notebooks call
        return self._fits.to_html(repr(self), final_metrics(self.state, {}), self.engine.explain().acted)

    def __enter__(self) -> Self:
        """Return the trainer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the trainer."""
        with self._noting_further_errors(error):
            self.close()

"""The parts of a trainer: each checks the arguments it is created from, and all invalid arguments are reported."""

from __future__ import annotations

import datetime
import secrets
from typing import TYPE_CHECKING, Any

import attrs

from composer.checkpoint.saver import savers
from composer.checkpoint.saving import reject_fsdp1
from composer.core import Callback, Interval, State
from composer.core.checks import as_list, check_run_name
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
from composer.loggers.console_logger import terminal_destinations
from composer.trainer.data.settings import TrainingData, check_model
from composer.trainer.evaluation.evaluate import Evaluations, check_can_be_evaluated
from composer.trainer.optimization import check_optimizers, make_scaler
from composer.trainer.reproducibility import choose_seed, seed_all
from composer.trainer.resume.state import SavesProgress
from composer.trainer.schedules import TrainingSchedule, check_optimizers_of
from composer.trainer.settings.arguments import Problems, check_flags, check_text, set_log_level
from composer.trainer.settings.compute import ComputeConfig
from composer.trainer.settings.loading import Loading, best_by
from composer.trainer.tools.environment import run_name_of_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from composer.checkpoint import KeepBest
    from composer.core import LoggerDestination

__all__ = ["Parts"]


@attrs.frozen
class Parts:
    """The parts of a trainer.

    Args:
        data: The data to train on.
        evaluations: The data to evaluate on, and when.
        computing: Device, precision and compilation.
        parallel: How several processes train one model.
        schedule: The duration and the learning rates.
        loading: The checkpoint to start from.
        savers: The callbacks that save checkpoints.
        displays: The progress bar and the lines on the console.
        seed: The seed.
        run_name: The name of the run.
    """

    data: TrainingData
    evaluations: Evaluations
    computing: ComputeConfig
    parallel: Parallelism
    schedule: TrainingSchedule
    loading: Loading
    savers: Sequence[Callback]
    displays: list[LoggerDestination]
    seed: int
    run_name: str

    @classmethod
    def create(cls, given: Any, signature: Callable[..., None]) -> Parts:
        """Return the parts; no process group, file or state of a run is created yet.

        Args:
            given: The arguments of a :class:`~composer.Trainer` as attributes.
            signature: The function that was called with them.

        Raises:
            TypeError: An argument is of the wrong kind.
            ValueError: A value is out of range, or two contradict each other.
        """
        problems = Problems()
        collect = problems.collect
        collect(check_flags, signature, vars(given))
        collect(_check_profiler, given.profiler)
        collect(check_text, "run_name", given.run_name, or_none=True)
        run_name = run_name_of_environment() if given.run_name is None else given.run_name
        collect(check_model, given.model, is_trained=given.train_dataloader is not None)
        data = collect(
            TrainingData,
            given.train_dataloader,
            given.train_dataloader_label,
            given.train_subset_num_batches,
            given.spin_dataloaders,
        )
        evaluations = collect(Evaluations, given.eval_dataloader, given.eval_interval, given.eval_subset_num_batches)
        computing = collect(
            ComputeConfig.make,
            given.device,
            given.precision,
            given.precision_config,
            given.compile_config,
            given.device_train_microbatch_size,
        )
        loading = collect(
            Loading,
            given.load_path,
            given.load_weights_only,
            given.load_strict_model_weights,
            given.load_ignore_keys,
            given.load_exclude_algorithms,
            autoresume=given.autoresume,
            folder=given.save_folder,
            run_name=run_name,
        )
        labels = evaluations.labels() if evaluations else ()
        keep_best = collect(best_by, given.save_best, given.model, labels)
        own_savers = collect(_savers, given, keep_best)
        parallel = collect(_parallelism, given, computing)
        schedule = collect(
            TrainingSchedule.make,
            given.max_duration,
            given.schedulers,
            given.scale_schedule_ratio,
            given.step_schedulers_every_batch,
        )
        if not problems.found:
            collect(data.check_end, schedule.max_duration)
        displays = collect(_displays, given)
        seed = collect(choose_seed, given.seed)
        collect(set_log_level, given.python_log_level)
        run_name = _generated_name() if run_name is None else run_name
        collect(check_run_name, run_name)
        if not problems.found:
            with problems.noted():
                if given.optimizers is not None:
                    check_optimizers(given.model, as_list(given.optimizers))
                check_optimizers_of(schedule.schedulers, as_list(given.optimizers))
        if not problems.found and given.eval_dataloader is not None:
            collect(check_can_be_evaluated, given.model)
        problems.check()
        return cls(data, evaluations, computing, parallel, schedule, loading, own_savers, displays, seed, run_name)

    def make_state(self, model: nn.Module) -> State:
        """Seed the global generators, move the model to the device, and return the state of the run.

        All processes get the first one's seed and name.
        """
        device, seed, run_name = self.computing.device, from_rank_zero(self.seed), from_rank_zero(self.run_name)
        seed_all((seed + get_data_rank()) % 2**32)
        if not is_on_meta(model):
            model.to(device)
        return State(
            model=model,
            rank_zero_seed=seed,
            run_name=run_name,
            device=device,
            max_duration=self.schedule.max_duration,
            precision=self.computing.precision,
            scaler=make_scaler(self.computing.precision, device),
            data_rank=get_data_rank(),
            gather=all_gather_data if get_world_size() > 1 else None,
        )


def _check_profiler(profiler: object) -> None:
    if not (profiler is None or isinstance(profiler, Callback)):
        raise TypeError(f"profiler must be a callback such as composer.profiler.Profiler, got {profiler!r}.")


def _savers(given: Any, keep_best: KeepBest | None) -> Sequence[Callback]:
    """Return the callbacks that save to ``save_folder``."""
    return savers(
        given.save_folder,
        given.save_filename,
        given.save_latest_filename,
        given.save_interval,
        overwrite=given.save_overwrite,
        num_checkpoints_to_keep=given.save_num_checkpoints_to_keep,
        keep_best=keep_best,
        weights_only=given.save_weights_only,
        ignore_keys=given.save_ignore_keys,
        continues=given.autoresume,
    )


def _parallelism(given: Any, computing: ComputeConfig | None) -> Parallelism:
    """Return how several processes train the model, if its wrapper, its data and the device allow it."""
    saves = given.save_folder is not None or any(isinstance(one, SavesProgress) for one in as_list(given.callbacks))
    if saves or given.load_path is not None or given.autoresume:
        reject_fsdp1(given.model)
    parallel = Parallelism(given.parallelism_config, given.ddp_sync_strategy)
    parallel.check_microbatch_size(given.device_train_microbatch_size)
    parallel.check_has_data(given.model)
    if computing is not None:
        parallel.check_device(computing.device)
    check_timeout(given.dist_timeout)
    return parallel


def _displays(given: Any) -> list[LoggerDestination]:
    """Return what the first process shows of the run."""
    is_first = get_global_rank() == 0
    return terminal_destinations(
        progress_bar=given.progress_bar and is_first,
        log_to_console=given.log_to_console and is_first,
        stream=given.console_stream,
        log_interval=Interval.named("console_log_interval", given.console_log_interval).every,
        log_traces=given.log_traces,
    )


def _generated_name() -> str:
    return f"{datetime.datetime.now(tz=datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"

"""One run of a study, in a process of its own: it constructs a trainer, trains and measures."""

from __future__ import annotations

import contextlib
import inspect
import math
import pickle
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
import xxhash
from torch import Tensor

from composer.ablation.results import EVALUATION_DIGEST, FIRST_LOSS, Result, label
from composer.core import Event, Logger, LoggerDestination, State
from composer.core.checks import abridged
from composer.core.evaluator import more_is_better, nearest_metric
from composer.core.saving.randomness import derive_seed
from composer.functional.nested import leaves
from composer.loggers.hyperparameters import hyperparameters
from composer.loggers.values import flat
from composer.trainer import Trainer
from composer.trainer.reproducibility import seed_all

RUN_VARIABLE = "COMPOSER_ABLATION_RUN"
"""The environment variable of a run's process, where no study may be started."""
CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
_DIGESTED_BATCHES = 2
_IDENTITY = (
    "device",
    "precision",
    "max_duration",
    "device_train_microbatch_size",
    "model",
    "train_dataloader",
    "evaluators",
    "optimizers",
    "schedulers",
)
"""The hyperparameters that identify a training, whatever its algorithms, its seed and its environment."""


class StudyError(ValueError):
    """The study cannot be measured as it is set up; no result of a run."""


class _StartedError(Exception):
    """Ends a run of which only the first batches are wanted."""


@attrs.frozen
class Job:
    """What a run needs, as data that can be sent to another process or machine.

    Args:
        arm: The names of the algorithms.
        seed: The seed.
        metric: The metric's name.
        payload: ``(make_trainer, algorithms)``, pickled by cloudpickle.
        folder: The folder of the study.
        search_path: The entries of ``sys.path`` with the user's modules.
        threads: The number of torch's threads; None for its default.
        clock: The name of the clock in ``CLOCKS``.
        only_start: Whether to stop after the first batches; they identify the training.
        mode: ``"max"`` or ``"min"``; None if the metric has to declare it.
    """

    arm: tuple[str, ...]
    seed: int
    metric: str
    payload: bytes = attrs.field(repr=False)
    folder: str
    search_path: tuple[str, ...] = attrs.field(default=(), repr=False)
    threads: int | None = None
    clock: str = "wall"
    only_start: bool = False
    mode: str | None = None

    @property
    def run_folder(self) -> Path:
        """The run's own folder, for its log and its checkpoints."""
        name = re.sub(r"[^\w+-]+", "-", label(self.arm))[:60]
        kind = "-start" if self.only_start else ""
        # Labels may differ only in characters that a file name cannot have.
        return Path(self.folder) / "runs" / f"{name}-{derive_seed(*self.arm) % 16**6:06x}-seed{self.seed}{kind}"


def measure(job: Job, imported: int = 0) -> Result:
    """Construct the trainer, train, all or only the first batches, and return what was measured.

    Args:
        job: The job.
        imported: The :func:`memory_of_files` of the process that this is a fork of. The peak memory is given as if this
            process had imported its libraries itself: a fork has only those pages of their files that it uses.

    Raises:
        StudyError: The metric is not logged, or ``make_trainer`` does not do what a study needs.
    """
    recorder = Recorder(job.metric, CLOCKS[job.clock], only_start=job.only_start)
    failure, settings, mode = None, {}, ""
    warned: dict[str, None] = {}
    try:
        with _noting_warnings(warned), _construct(job) as trainer:
            recorder.attach(trainer)
            with contextlib.suppress(_StartedError):
                trainer.fit()
            if job.only_start:
                settings, mode = _identify(trainer.state), _mode(trainer.state, job)
    except StudyError:
        raise
    except Exception as error:  # noqa: BLE001  (any error is the run's result)
        traceback.print_exc()
        failure = abridged(f"{type(error).__name__}: {error}")
    result = Result(
        job.arm,
        job.seed,
        failure=failure,
        batches=recorder.batches.hexdigest(),
        weights=recorder.weights,
        settings=settings,
        warnings=tuple(warned),
        mode=mode,
    )
    if job.only_start:
        return result
    if failure is None:
        recorder.check()
    seconds = None if failure else recorder.seconds
    return attrs.evolve(result, curve=tuple(recorder.curve), seconds=seconds, memory=_peak_memory(imported))


@contextlib.contextmanager
def _noting_warnings(warned: dict[str, None]) -> Iterator[None]:
    """Add the warnings for users to ``warned``; all of them are still written to the log."""
    show = warnings.showwarning

    def note(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
        if issubclass(category, UserWarning):
            warned[abridged(" ".join(str(message).split()))] = None
        show(message, category, *place, **options)

    with warnings.catch_warnings():
        warnings.showwarning = note
        yield


def _identify(state: State) -> dict[str, str]:
    """Return what identifies a training that has begun, except the digests of its data and weights."""
    described = hyperparameters(state)
    settings = {name: described[name] for name in _IDENTITY} | {"batches_per_epoch": state.dataloader_len}
    digest = xxhash.xxh3_128()
    for evaluator in state.evaluators:
        loader: Any = evaluator.dataloader.dataloader
        with contextlib.suppress(TypeError):  # not every loader has a length
            settings[f"evaluators/{evaluator.label}/batches"] = len(loader)
        for leaf in leaves(next(iter(loader), None)):
            _update(digest, leaf)
    settings[EVALUATION_DIGEST] = digest.hexdigest()
    losses = [float(one) for one in leaves(state.total_loss) if isinstance(one, Tensor)]
    settings[FIRST_LOSS] = f"{math.fsum(losses):.6g}"
    return {name: str(value) for name, value in flat(settings).items()}


def _mode(state: State, job: Job) -> str:
    """Return whether larger or smaller values are better: what the metric declares, or else the caller.

    Raises:
        StudyError: Neither does.
    """
    metric = job.metric.removeprefix("metrics/")
    if metric.startswith("loss/"):
        return "min"
    known = {str(state.dataloader_label): state.train_metrics, **state.eval_metrics}
    labels = [label for label in known if metric.startswith(f"{label}/")]  # a label may have a slash
    label = max(labels, key=len, default="")
    declared = more_is_better(known.get(label, {}), metric.removeprefix(f"{label}/"))
    if declared is not None:
        return "max" if declared else "min"
    if job.mode is None:
        names = [f"{one}/{name}" for one, own in known.items() for name in own if more_is_better(own, name) is not None]
        hint = "." if metric in names else nearest_metric(metric, names)
        raise StudyError(
            f"metric must be a metric of the model ({', '.join(names) or 'none'}) that declares whether more is better "
            f"(higher_is_better), or mode must be 'max' or 'min', got {job.metric!r}{hint}"
        )
    return job.mode


def _construct(job: Job) -> Trainer:
    make_trainer, methods = pickle.loads(job.payload)  # noqa: S301  (from the user's own process)
    seed_all(job.seed)
    chosen = [methods[name] for name in job.arm]
    algorithms = [one() for one in chosen if not isinstance(one, Mapping)]
    given = [one for one in chosen if isinstance(one, Mapping)]
    options = {key: value for one in given for key, value in one.items()}
    if sum(map(len, given)) > len(options):
        raise ValueError(f"{label(job.arm)} has several values of one argument of make_trainer.")
    if "folder" in inspect.signature(make_trainer).parameters:
        options["folder"] = str(job.run_folder)
    trainer = make_trainer(algorithms, job.seed, **options)
    if not isinstance(trainer, Trainer):
        raise StudyError(f"make_trainer must return a Trainer, got {type(trainer).__name__}.")
    # First, because a checkpoint also has the seed of its run.
    if trainer.state.timestamp.batch.value:
        raise StudyError(
            f"make_trainer returned a trainer that has trained {trainer.state.timestamp.batch.value} batches: runs "
            "share its checkpoints. Add a parameter 'folder' to make_trainer and save there."
        )
    if trainer.state.rank_zero_seed != job.seed:
        raise StudyError(
            f"make_trainer must pass its seed to Trainer(seed=seed): the trainer has the seed "
            f"{trainer.state.rank_zero_seed}, expected {job.seed}."
        )
    if [id(one) for one in trainer.state.algorithms] != [id(one) for one in algorithms]:
        raise StudyError(
            "make_trainer must pass exactly its algorithms to Trainer(algorithms=algorithms), got "
            f"{[type(one).__name__ for one in trainer.state.algorithms]}."
        )
    return trainer


def _peak_memory(imported: int) -> int | None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    with contextlib.suppress(OSError):
        # getrusage() of Linux includes the memory of the process that started this one.
        if peak := _status("VmHWM"):
            return peak + max(0, imported - memory_of_files())
    try:
        import resource  # noqa: PLC0415  (not on Windows)
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory_of_files() -> int:
    """Return the bytes of files, mostly libraries, in the memory of this process (Linux)."""
    return _status("RssFile")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


class Recorder(LoggerDestination):
    """Records a metric after each evaluation with the time of training, and digests of the data and the weights."""

    def __init__(self, metric: str, clock: Callable[[], float], *, only_start: bool = False) -> None:
        self.curve: list[tuple[float, float]] = []
        self.seconds = 0.0
        self.batches = xxhash.xxh3_128()
        self.weights: str | None = None
        self._metric, self._clock, self._only_start = metric, clock, only_start
        self._names = (metric, f"metrics/{metric}")
        self._logged: dict[str, None] = {}
        self._newest: Any = None
        self._num_batches, self._began, self._paused = 0, 0.0, 0.0

    def attach(self, trainer: Trainer) -> None:
        """Observe a trainer that has not trained yet."""
        if not any(Event.INIT in one.runs_at_events() or not one.runs_at_events() for one in trainer.state.algorithms):
            digest = xxhash.xxh3_128()
            for name, weight in trainer.state.model.state_dict().items():
                _update(digest, name)
                _update(digest, weight)
            self.weights = digest.hexdigest()
        trainer.logger.destinations.append(self)

    def wrap_event(self, event: Event, call: Callable[[], object]) -> Callable[[], object]:
        """Digest the first batches before algorithms change them."""
        if event is not Event.AFTER_DATALOADER:
            return call

        def run() -> None:
            if self._num_batches < _DIGESTED_BATCHES:
                self._digest_batch()
            call()

        return run

    def _digest_batch(self) -> None:
        began = self._now()
        self._num_batches += 1
        for leaf in leaves(self._state.batch):
            _update(self.batches, leaf)
        if self._only_start and self._num_batches == _DIGESTED_BATCHES:
            raise _StartedError
        self._paused += self._now() - began

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep the newest value of the metric."""
        self._logged.update(dict.fromkeys(metrics))
        for name in self._names:
            if name in metrics:
                self._newest = metrics[name]

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start the clock."""
        self._state = state
        self._began = self._now()

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Stop the clock."""
        self._stopped = self._now()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Record the metric, and start the clock again."""
        self._record(state, self._stopped)
        self._paused += self._now() - self._stopped

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Record a metric that is not computed by an evaluation."""
        self._record(state, self._now())

    def fit_end(self, state: State, logger: Logger) -> None:
        """Record the time of the training."""
        now = self._now()
        self.seconds = now - self._began - self._paused
        self._record(state, now)

    def check(self) -> None:
        """Raise a StudyError if the metric was never logged."""
        if not self.curve:
            names = sorted(name.removeprefix("metrics/") for name in self._logged)
            hint = nearest_metric(self._metric, names)
            raise StudyError(
                f"metric must be a metric that the trainer logs ({', '.join(names) or 'nothing'}), got "
                f"{self._metric!r}{hint}"
            )

    def _now(self) -> float:
        if self._state.device.type == "cuda":
            torch.cuda.synchronize(self._state.device)
        return self._clock()

    def _record(self, state: State, now: float) -> None:
        if self._newest is None:
            return
        value, self._newest = float(self._newest), None
        batch = int(state.timestamp.batch)
        if not math.isfinite(value):
            raise FloatingPointError(f"{self._metric} is {value} after {batch} batches")
        loss = state.total_loss
        if isinstance(loss, Tensor) and not bool(loss.isfinite().all()):
            raise FloatingPointError(f"the training loss is {loss.tolist()} after {batch} batches")
        self.curve.append((now - self._began - self._paused, value))


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, (str, int, float)):
        digest.update(repr(value).encode())
    elif isinstance(value, Tensor) and value.numel():
        digest.update(repr((tuple(value.shape), value.dtype)).encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())

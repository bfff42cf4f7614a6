"""Run a study: every arm with every seed, each run in a process of its own."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from tqdm.auto import tqdm

from composer.ablation.results import Result, ResultsFile, Settings, Start, label
from composer.ablation.runs import RUN_VARIABLE, Job, StudyError, run_job
from composer.ablation.study import Study
from composer.core import Algorithm
from composer.core.checks import nearest, shortened
from composer.loggers.products import import_product, require_product
from composer.trainer.tools.hyperparameters import hardware, plain_settings, settings_of, versions

if TYPE_CHECKING:
    from composer.trainer import Trainer

__all__ = ["ablate"]

Arm = tuple[str, ...]
KINDS = ("baseline", "each", "all", "leave_one_out", "greedy")
_PENDING = 16
"""The number of runs that are submitted at a time to an executor, if there is a budget."""
_SECONDS = {"sec": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


def ablate(
    make_trainer: Callable[..., Trainer],
    algorithms: Mapping[str, Callable[[], Algorithm]],
    *,
    metric: str,
    mode: str = "max",
    arms: Sequence[str | Sequence[str]] = ("baseline", "each", "all"),
    seeds: int | Sequence[int] = 5,
    folder: str | os.PathLike[str] = "ablation",
    processes: int | None = None,
    target: float | None = None,
    budget: str | float | None = None,
    executor: Executor | None = None,
    progress_bar: bool = True,
) -> Study:
    """Measure which algorithms improve a training, and what they cost.

    Every arm, a set of algorithms, is trained with every seed. Runs of one seed have the same data order, the same
    initial weights and the same draws of the algorithms that they share, and are compared with each other.

    Each run is a new process. The seed is set there before ``make_trainer`` is called. A run that fails (an exception,
    no memory, NaN) is a result with its reason. Results are appended to ``results.jsonl`` in ``folder``; a study that
    was killed continues there when it is called again.

    Args:
        make_trainer: ``f(algorithms, seed) -> Trainer``. It constructs everything from the start and passes both to the
            trainer. If it has a parameter ``folder``, this is an empty folder of the run, for its checkpoints. It is
            sent by cloudpickle: it may be a function of a script, a notebook or a module that can be imported.
        algorithms: Functions that construct the algorithms, by their names in the table: a class or a lambda.
        metric: The metric, as it is logged: ``"eval/MulticlassAccuracy"``, ``"loss/train/total"``, …
        mode: ``"max"`` if larger values are better, else ``"min"``.
        arms: ``"baseline"`` (no algorithm; always measured), ``"each"`` (one at a time), ``"all"``,
            ``"leave_one_out"`` (all but one), ``"greedy"`` (add the best one as long as it helps), or names:
            ``["mixup", "ema"]``.
        seeds: The number of seeds, from 0, or the seeds.
        folder: The folder of the results.
        processes: The number of runs at a time, 1 if None. With more than one, measured times are rough. With an
            executor, the number of runs that are submitted to it at a time: if None, all, or 16 with a budget.
        target: The quality for the time to quality; the baseline's final one with the same seed if None.
        budget: The time for all runs, ``"30min"`` or seconds: after 1, 2, 4, … seeds the worse half of the arms is
            stopped if the time is not sufficient for all of them. Unlimited if None.
        executor: Where to execute the runs instead of on this machine: any :class:`concurrent.futures.Executor`, such
            as that of a Dask client. Its workers need this library, and the folder at the same path. Times are rough.
        progress_bar: Whether to draw a progress bar.

    Returns:
        The study.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: A value is out of range, the folder has results of another study or training, the metric is not
            logged, the baseline does not train its first batches, or ``make_trainer`` does not give the same training
            for the same seed, or gives the same one for each.
        ModuleNotFoundError: scipy or cloudpickle is not installed.
        RuntimeError: It is called in the process of a run.

    Example:
        >>> ablate(print, {}, metric="eval/Accuracy", mode="highest")
        Traceback (most recent call last):
        ValueError: mode must be 'max' or 'min', got 'highest'.
    """
    if RUN_VARIABLE in os.environ:  # else each run would start a study, whose runs would start studies
        raise RuntimeError(
            "ablate() must not be called when the module of make_trainer is imported, as each run imports it. Call it "
            "under if __name__ == '__main__':, or define its arguments as variables for python -m composer.ablation."
        )
    if mode not in {"max", "min"}:
        raise ValueError(f"mode must be 'max' or 'min', got {mode!r}.")
    if not callable(make_trainer):
        raise TypeError(f"make_trainer must be a function f(algorithms, seed), got {shortened(make_trainer)}.")
    _check_parameters(make_trainer)
    if processes is not None and (type(processes) is not int or processes < 1):
        raise ValueError(f"processes must be a whole number of at least 1, got {processes!r}.")
    require_product("scipy", "ablation")
    described = _describe(algorithms)
    wanted = make_arms(arms, list(described))
    file = ResultsFile(Path(folder) / "results.jsonl")
    is_alone = executor is None and processes in {None, 1}
    environment = plain_settings({"versions": versions(), "hardware": hardware(torch.device("cpu"))})
    settings = Settings(
        metric,
        mode,
        _to_seeds(seeds),
        described,
        None if target is None else float(target),
        _to_seconds(budget),
        is_rough=not is_alone or _has_other_times(file, environment),
        environment=environment,
    )
    _check_same_study(file, settings)
    payload = import_product("cloudpickle", "ablation").dumps((make_trainer, dict(algorithms)))
    # Processes beside each other share the cores.
    threads = max(1, (os.cpu_count() or 1) // (processes or 1)) if executor is None and not is_alone else None
    job = Job((), settings.seeds[0], metric, payload, str(Path(folder).absolute()), tuple(sys.path), threads)
    if executor is None:
        width: int | None = processes or 1
    else:
        width = processes or (None if settings.budget is None else _PENDING)
    own = ThreadPoolExecutor(width) if executor is None else None
    total = len(wanted.fixed) * len(settings.seeds)
    with tqdm(total=total, unit="run", desc="ablate", disable=not progress_bar) as bar:
        experiment = _Experiment(file, settings, job, executor or own, width, bar)
        try:
            experiment.begin()
            experiment.run(wanted.fixed)
            if wanted.greedy:
                experiment.run_greedy(list(described))
        finally:
            if own is not None:
                own.shutdown(cancel_futures=True)
    return Study(settings, file.results)


@attrs.frozen
class Arms:
    """The arms of a study: those known from the start, and whether to search for more greedily."""

    fixed: list[Arm]
    greedy: bool


def make_arms(arms: Sequence[str | Sequence[str]], names: Sequence[str]) -> Arms:
    """Return the arms, the baseline first, without repetitions; their algorithms are in the order of ``names``.

    Raises:
        ValueError: A kind of arm or an algorithm is unknown.

    Example:
        >>> make_arms(["each", "all"], ["a", "b"]).fixed
        [(), ('a',), ('b',), ('a', 'b')]
    """
    if isinstance(arms, str):
        arms = [arms]
    found: list[Arm] = [()]
    for one in arms:
        if isinstance(one, str):
            if one not in KINDS:
                raise ValueError(
                    f"arms must be of {', '.join(KINDS)} or lists of names, got {one!r}{nearest(one, KINDS)}"
                )
            if one == "each":
                found += [(name,) for name in names]
            elif one == "all":
                found.append(tuple(names))
            elif one == "leave_one_out":
                found += [tuple(name for name in names if name != left) for left in names]
        else:
            for name in one:
                if name not in names:
                    raise ValueError(
                        f"arms must name algorithms of {', '.join(names)}, got {name!r}{nearest(name, names)}"
                    )
            found.append(tuple(name for name in names if name in one))
    return Arms(list(dict.fromkeys(found)), "greedy" in [one for one in arms if isinstance(one, str)])


class _Experiment:
    """Executes the runs that have no result yet, and stores theirs."""

    def __init__(
        self, file: ResultsFile, settings: Settings, job: Job, executor: Any, width: int | None, bar: tqdm[Any]
    ) -> None:
        self._file, self._settings, self._job = file, settings, job
        self._executor, self._width, self._bar = executor, width, bar
        self._done = {(result.arm, result.seed): result for result in file.results}
        self._counted: set[tuple[Arm, int]] = set()
        self._starts: dict[tuple[Arm, int], Start] = {}
        self._began, self._spent = time.perf_counter(), 0.0
        # A study that was killed has used some of its budget.
        self._spent_before = sum(result.wall_seconds for result in file.results) / (width or 1)

    def begin(self) -> None:
        """Start the baseline, compare its start with that of the stored results, and write settings and start."""
        stored, own = self._file.start, [one for one in self._file.results if not one.arm and one.failure is None]
        if not self._file.results:
            stored = None
        self._bar.set_postfix_str("checking the baseline")
        seed = stored.seed if stored else own[0].seed if own else self._settings.seeds[0]
        start = self._start((), seed)
        if stored is None and own and own[0].batches is not None:  # a file of an earlier version
            stored = Start((), seed, own[0].batches, own[0].weights, start.settings)
        if stored is not None and (differences := stored.differences(start)):
            raise ValueError(
                "folder must be empty or have results of the same training, but the following differ from those of "
                f"{self._file.path}: {', '.join(differences)}. Choose another folder."
            )
        self._file.write_settings(self._settings)
        if self._file.start != start:
            self._file.write_start(start)

    def run(self, arms: Sequence[Arm]) -> None:
        """Run arms with all seeds; with a budget, stop the worse ones if it is not sufficient for all."""
        seeds, remaining = self._settings.seeds, list(arms)
        if self._settings.budget is None:
            self._complete(list(itertools.product(seeds, remaining)))
            return
        done = 0
        while done < len(seeds) and not self._is_used_up():
            rung = seeds[done : max(1, 2 * done)]
            self._complete(list(itertools.product(rung, remaining)))
            done += len(rung)
            remaining = self._promising(remaining, len(seeds) - done)

    def run_greedy(self, names: Sequence[str]) -> None:
        """Add the algorithm that improves the metric most, as long as one improves it by more than its error."""
        chosen: Arm = ()
        while len(chosen) < len(names):
            candidates = [
                tuple(name for name in names if name in chosen or name == added)
                for added in names
                if added not in chosen
            ]
            self._bar.total = (self._bar.total or 0) + len(
                [c for c in candidates for s in self._settings.seeds if (c, s) not in self._counted]
            )
            self.run([(), *([chosen] if chosen else []), *candidates])
            study, sign = Study(self._settings, self._file.results), self._settings.sign
            gains = [(gain, arm) for arm in candidates if (gain := study.improvement(arm, chosen)) is not None]
            if not gains:
                return
            gain, best = max(gains, key=lambda pair: sign * pair[0].mean)
            error = 0.0 if gain.low is None else (gain.mean - gain.low) / 2  # close to the standard error of many seeds
            if sign * gain.mean <= error:
                return
            chosen = best

    def _complete(self, wanted: Sequence[tuple[int, Arm]]) -> None:
        """Execute the wanted runs without a result; those of one seed, one after the other, take turns."""
        waiting = [(arm, seed) for seed, arm in wanted if (arm, seed) not in self._done]
        self._count([(arm, seed) for seed, arm in wanted if (arm, seed) in self._done])
        running: dict[Future[Result], tuple[Arm, int]] = {}
        try:
            while waiting or running:
                while waiting and (self._width is None or len(running) < self._width) and not self._is_used_up():
                    arm, seed = waiting.pop(0)
                    self._bar.set_postfix_str(f"{label(arm)}, seed {seed}")
                    running[self._submit(arm, seed)] = arm, seed
                if not running:
                    return
                done = wait(running, return_when=FIRST_COMPLETED).done
                for future in [one for one in running if one in done]:  # a set has no order
                    result = future.result()
                    self._spent += result.wall_seconds
                    self._check_pairing(result)
                    self._file.append(result)
                    self._done[running.pop(future)] = result
                    self._count([(result.arm, result.seed)])
        finally:
            for future in running:
                future.cancel()

    def _submit(self, arm: Arm, seed: int) -> Future[Result]:
        future: Future[Result] = self._executor.submit(run_job, attrs.evolve(self._job, arm=arm, seed=seed))
        return future

    def _start(self, arm: Arm, seed: int) -> Start:
        if (arm, seed) not in self._starts:
            job = attrs.evolve(self._job, arm=arm, seed=seed, only_start=True)
            self._starts[arm, seed] = self._executor.submit(run_job, job).result()
        return self._starts[arm, seed]

    def _count(self, runs: Iterable[tuple[Arm, int]]) -> None:
        new = set(runs) - self._counted
        self._counted |= new
        self._bar.update(len(new))

    def _is_used_up(self) -> bool:
        budget = self._settings.budget
        return budget is not None and self._spent_before + time.perf_counter() - self._began >= budget

    def _promising(self, arms: list[Arm], num_seeds: int) -> list[Arm]:
        """Return the arms to continue with: all if the budget is sufficient for them, else the better half."""
        assert self._settings.budget is not None
        walls: dict[Arm, list[float]] = {arm: [] for arm in arms}
        for (arm, _), result in self._done.items():
            if arm in walls:
                walls[arm].append(result.wall_seconds)
        elapsed = time.perf_counter() - self._began
        at_a_time = max(1.0, self._spent / elapsed)  # as measured: an executor may have fewer workers than runs
        needed = num_seeds * sum(sum(times) / len(times) for times in walls.values() if times) / at_a_time
        left = self._settings.budget - self._spent_before - elapsed
        if needed <= left:
            return arms
        study, sign = Study(self._settings, self._file.results), self._settings.sign
        gains = {arm: gain.mean * sign for arm in arms if arm and (gain := study.improvement(arm)) is not None}
        better = sorted(gains, key=gains.__getitem__, reverse=True)[: (len(gains) + 1) // 2]
        return [arm for arm in arms if not arm or arm in better]

    def _check_pairing(self, result: Result) -> None:
        """Check that a run had the data and weights of the others of its seed, if necessary by starting one again."""
        if (result.arm, result.seed) in self._starts:
            self._check_repetition(result)
        for other in self._done.values():
            if other.failure is not None or result.failure is not None:
                continue
            # An algorithm may change the data set itself, which is no error: only a repetition shows the cause.
            if other.seed == result.seed and _differences(result, other):
                self._check_repetition(other)
            if other.arm == result.arm and other.seed != result.seed:
                _check_seeds(result, other)

    def _check_repetition(self, result: Result) -> None:
        differences = _differences(result, self._start(result.arm, result.seed))
        if differences:
            raise StudyError(
                "make_trainer must give the same training for the same seed, but the "
                f"{differences[0]} of {label(result.arm)} with seed {result.seed} differ when it is repeated"
                + ("" if result.failure is None else f" ({result.failure})")
                + ". Runs share a state, such as a file or a folder of checkpoints, or draw from a generator that "
                "is not seeded: construct everything in make_trainer, from its seed."
            )


def _differences(one: Result, other: Result | Start) -> list[str]:
    """Return which digests of two runs differ; a run whose process was killed has none."""
    pairs = {"first batches": (one.batches, other.batches), "initial weights": (one.weights, other.weights)}
    return [name for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]]


def _check_seeds(one: Result, other: Result) -> None:
    """Check that two runs with different seeds are not the same training."""
    if None in (one.batches, one.weights) or (one.batches, one.weights) != (other.batches, other.weights):
        return
    if [value for _, value in one.curve] == [value for _, value in other.curve]:
        raise StudyError(
            f"make_trainer must use its seed, but {label(one.arm)} with seeds {other.seed} and {one.seed} has the same "
            "batches, initial weights and values of the metric. Construct the model and the data from the seed, or "
            "measure one seed: repetitions of one training are no evidence."
        )


def _check_parameters(make_trainer: Callable[..., Trainer]) -> None:
    try:
        signature = inspect.signature(make_trainer)
    except ValueError:  # of some functions written in C
        return
    try:
        signature.bind([], 0, **({"folder": ""} if "folder" in signature.parameters else {}))
    except TypeError as error:
        raise TypeError(
            f"make_trainer must be a function f(algorithms, seed) or f(algorithms, seed, folder), got "
            f"{shortened(make_trainer)} with the parameters {signature}: {error}."
        ) from None


def _describe(algorithms: Mapping[str, Callable[[], Algorithm]]) -> dict[str, str]:
    """Return the class and settings of each algorithm as text, which identify it when a study is continued."""
    if not isinstance(algorithms, Mapping):
        raise TypeError(f"algorithms must be a dictionary of functions by name, got {shortened(algorithms)}.")
    described = {}
    for name, factory in algorithms.items():
        if not isinstance(name, str) or not name.strip() or name == "baseline" or "\n" in name:
            raise ValueError(f"algorithms must have names that are texts, other than 'baseline', got {name!r}.")
        if isinstance(factory, Algorithm) or not callable(factory):
            raise TypeError(
                f"algorithms[{name!r}] must be a function that constructs a new algorithm for each run, got "
                f"{shortened(factory)}. Write lambda: {type(factory).__name__}(…)."
            )
        algorithm = factory()
        if not isinstance(algorithm, Algorithm):
            raise TypeError(f"algorithms[{name!r}] must construct an Algorithm, got {shortened(algorithm)}.")
        options = ", ".join(f"{key}={value}" for key, value in plain_settings(settings_of(algorithm)).items())
        described[name] = f"{type(algorithm).__name__}({options})"
    return described


def _to_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    given = tuple(range(seeds)) if isinstance(seeds, int) and not isinstance(seeds, bool) else seeds
    if not isinstance(given, Sequence) or not all(type(seed) is int and 0 <= seed < 2**32 for seed in given):
        raise TypeError(f"seeds must be a number of seeds or a list of whole numbers below 2**32, got {seeds!r}.")
    if not given or len(set(given)) != len(given):
        raise ValueError(f"seeds must be at least one, and different from each other, got {seeds!r}.")
    return tuple(given)


def _to_seconds(budget: str | float | None) -> float | None:
    if budget is None:
        return None
    number: Any = budget
    if isinstance(budget, str):
        unit = budget.lstrip("0123456789. ")
        number = budget.removesuffix(unit) if unit in _SECONDS else ""
    try:
        seconds = float(number) * (_SECONDS[unit] if isinstance(budget, str) else 1)
    except (TypeError, ValueError):
        raise ValueError(f"budget must be seconds or a text such as '30min' or '2h', got {budget!r}.") from None
    if not 0 < seconds < float("inf"):
        raise ValueError(f"budget must be more than 0 seconds, got {budget!r}.")
    return seconds


def _has_other_times(file: ResultsFile, environment: dict[str, Any]) -> bool:
    """Return whether the stored times are rough, or were measured on other hardware."""
    if file.settings is None or not file.results:
        return False
    return file.settings.is_rough or file.settings.environment.get("hardware") != environment["hardware"]


def _check_same_study(file: ResultsFile, settings: Settings) -> None:
    stored = file.settings
    if stored is None or not file.results:
        return
    changed = [name for name in ("metric", "mode") if getattr(stored, name) != getattr(settings, name)]
    common = stored.algorithms.keys() & settings.algorithms.keys()
    changed += [
        f"algorithms[{name!r}]" for name in sorted(common) if stored.algorithms[name] != settings.algorithms[name]
    ]
    if changed:
        raise ValueError(
            f"folder must be empty or have results of the same study, but {', '.join(changed)} of {file.path} "
            "differ. Choose another folder."
        )

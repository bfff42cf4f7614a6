"""Run a study: every arm with every seed, each run in a process of its own."""

from __future__ import annotations

import contextlib
import inspect
import os
import platform
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from tqdm.auto import tqdm

from composer.ablation.processes import Forks, run_job
from composer.ablation.results import Result, ResultsFile, Settings, label
from composer.ablation.runs import CLOCKS, RUN_VARIABLE, Job, StudyError
from composer.ablation.study import Study
from composer.core import Algorithm
from composer.core.checks import nearest, shortened
from composer.functional.checks import check_choice, check_whole
from composer.loggers.hyperparameters import plain_settings, settings_of, versions
from composer.loggers.products import import_product, require_product

if TYPE_CHECKING:
    from composer.trainer import Trainer

Arm = tuple[str, ...]


def ablate(
    make_trainer: Callable[..., Trainer],
    algorithms: Mapping[str, Callable[[], Algorithm] | Mapping[str, Any]],
    *,
    metric: str = "",
    mode: str | None = None,
    arms: Sequence[str | Sequence[str]] = ("baseline", "each", "all"),
    seeds: int | Sequence[int] = 5,
    folder: str | os.PathLike[str] = "ablation",
    processes: int | None = None,
    target: float | None = None,
    executor: Executor | None = None,
    progress_bar: bool = True,
    clock: str = "wall",
    held_out: Sequence[int] | None = None,
) -> Study:
    """Measure which algorithms improve a training, and what they cost.

    Every arm, a set of algorithms, is trained with every seed. Runs of one seed have the same data order, the same
    initial weights and the same draws of the algorithms that they share, and are compared with each other.

    Each run is a process of its own, on Linux a fork of one that has imported what the baseline imports, so that this
    is not repeated for each run. The seed is set there before ``make_trainer`` is called. A run that fails (an
    exception, no memory, NaN) is a result with its reason. Results are appended to ``results.jsonl`` in ``folder``; a
    study that was killed continues there when it is called again.

    Args:
        make_trainer: ``f(algorithms, seed) -> Trainer``. It constructs everything from the start and passes both to the
            trainer. If it has a parameter ``folder``, this is an empty folder of the run, for its checkpoints. It is
            sent by cloudpickle: it may be a function of a script, a notebook or a module that can be imported.
        algorithms: Functions that construct the algorithms, by their names in the table: a class or a lambda. A
            dictionary stands for a method that is no algorithm: further arguments of ``make_trainer``, such as
            ``{"optimizer": "muon"}``.
        metric: The metric, as it is logged: ``"eval/MulticlassAccuracy"``, ``"loss/train/total"``, … Without it, an
            error lists those of the model.
        mode: ``"max"`` if larger values are better, else ``"min"``. If None, the metric's ``higher_is_better`` decides;
            a loss is better if it is smaller. A study that is continued keeps its own.
        arms: ``"baseline"`` (no algorithm; always measured), ``"each"`` (one at a time), ``"all"``,
            ``"leave_one_out"`` (all but one), or names: ``["mixup", "ema"]``. ``"greedy"`` searches for the best set:
            each round trains the set found until then with one more algorithm, and adds the one that improves the mean
            over the seeds most, until none does. See :attr:`.Study.proposal`.
        seeds: The number of seeds, from 0, or the seeds.
        folder: The folder of the results.
        processes: The number of runs at a time, 1 if None. With more than one, measured times are rough. With an
            executor, the number of runs that are submitted to it at a time, all if None.
        target: The quality for the time to quality; the baseline's final one with the same seed if None.
        executor: Where to execute the runs instead of on this machine: any :class:`concurrent.futures.Executor`, such
            as that of a Dask client. Its workers need this library, and the folder at the same path. Times are rough.
        progress_bar: Whether to draw a progress bar.
        clock: ``"wall"``; or ``"processor"`` for the processor time of all threads of a run, which other programs
            disturb less. The work of a GPU is not in it.
        held_out: For ``"greedy"``: the seeds with which its proposal and the baseline are trained at the end, as the
            search favours lucky algorithms; by default as many as ``seeds``, behind them. See :attr:`.Study.held_out`.

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
        ValueError: mode must be one of 'max', 'min', got 'highest'.
    """
    if RUN_VARIABLE in os.environ:  # else each run would start a study, whose runs would start studies
        raise RuntimeError(
            "ablate() must not be called when the module of make_trainer is imported, as each run imports it. Call it "
            "under if __name__ == '__main__':, or define its arguments as variables for python -m composer.ablation."
        )
    _check_settings(make_trainer, mode, clock, processes)
    described = _describe(algorithms)
    chosen = make_arms(arms, list(described))
    _check_arguments(make_trainer, algorithms, chosen)
    file = ResultsFile(Path(folder) / "results.jsonl")
    stored = file.settings if file.results else None
    is_alone = executor is None and processes in {None, 1}
    machine = {"hostname": platform.node(), "machine": platform.machine(), "num_cpus": os.cpu_count()}
    environment = {"versions": versions(), "hardware": machine}
    settings = Settings(
        metric,
        mode or (stored.mode if stored is not None else ""),
        _to_seeds(seeds),
        described,
        None if target is None else float(target),
        is_rough=not is_alone or (stored is not None and stored.is_rough_for(environment)),
        environment=environment,
        clock=clock,
        held_out=_to_held_out(held_out, _to_seeds(seeds), arms, stored),
    )
    changed = stored.differences(settings) if stored is not None else []
    if changed:
        raise ValueError(
            f"folder must be empty or have results of the same study, but {', '.join(changed)} of {file.path} "
            "differ. Choose another folder."
        )
    payload = import_product("cloudpickle", "ablation").dumps((make_trainer, dict(algorithms)))
    # Processes beside each other share the cores.
    threads = max(1, (os.cpu_count() or 1) // (processes or 1)) if executor is None and not is_alone else None
    job = Job(
        (),
        settings.seeds[0],
        metric,
        payload,
        str(Path(folder).absolute()),
        tuple(sys.path),
        threads,
        clock,
        mode=settings.mode or None,
    )
    wanted = [(arm, seed) for seed in settings.seeds for arm in chosen]  # arms take turns
    width = processes or (1 if executor is None else len(wanted))
    with (
        contextlib.closing(Forks()) as forks,
        ThreadPoolExecutor(width if executor is None else 1) as own,  # starts no thread before it is used
        tqdm(total=0, unit="run", desc="ablate", disable=not progress_bar) as bar,
    ):

        def submit(job: Job) -> Future[Result]:
            return own.submit(run_job, job, forks) if executor is None else executor.submit(run_job, job)

        experiment = _Experiment(file, settings, job, submit, bar)
        experiment.begin()
        experiment.run(wanted, width)
        return experiment.search(width)


def make_arms(arms: Sequence[str | Sequence[str]], names: Sequence[str]) -> list[Arm]:
    """Return the arms, the baseline first, without repetitions; their algorithms are in the order of ``names``.

    Raises:
        ValueError: A kind of arm or an algorithm is unknown.

    Example:
        >>> make_arms(["each", "all"], ["a", "b"])
        [(), ('a',), ('b',), ('a', 'b')]
    """
    kinds: dict[str, list[Arm]] = {
        "baseline": [],
        "each": [(name,) for name in names],
        "all": [tuple(names)],
        "leave_one_out": [tuple(name for name in names if name != left) for left in names],
        "greedy": [(name,) for name in names],  # its first round
    }
    found: list[Arm] = [()]
    for one in [arms] if isinstance(arms, str) else arms:
        wanted, known = ([one], list(kinds)) if isinstance(one, str) else (one, names)
        for name in wanted:
            if name not in known:
                raise ValueError(
                    f"arms must be of {', '.join(kinds)} or lists of the names {', '.join(names)}, got {name!r}"
                    f"{nearest(name, known)}"
                )
        found += kinds[one] if isinstance(one, str) else [tuple(name for name in names if name in one)]
    return list(dict.fromkeys(found))


class _Experiment:
    """Executes the runs that have no result yet, and stores theirs."""

    def __init__(
        self, file: ResultsFile, settings: Settings, job: Job, submit: Callable[[Job], Future[Result]], bar: tqdm[Any]
    ) -> None:
        self._file, self.settings, self._job = file, settings, job
        self._submit, self._bar = submit, bar
        self._starts: dict[tuple[Arm, int], Result] = {}

    def begin(self) -> None:
        """Start the baseline, compare its start with that of the stored results, and write settings and start."""
        stored = self._file.start if self._file.results else None
        self._bar.set_postfix_str("checking the baseline")
        start = self._start((), stored.seed if stored else self.settings.seeds[0])
        if stored is not None and (differences := stored.differences(start)):
            raise ValueError(
                "folder must be empty or have results of the same training, but the following differ from those of "
                f"{self._file.path}: {', '.join(differences)}. Choose another folder."
            )
        given = self.settings.mode
        if given and start.mode != given:
            warnings.warn(
                f"mode={given!r} is used, but {self.settings.metric} declares the opposite (its higher_is_better; a "
                "loss is better if it is smaller).",
                stacklevel=3,
            )
        self.settings = attrs.evolve(self.settings, mode=given or start.mode)
        if self._file.settings != self.settings:
            self._file.append("settings", self.settings)
        if self._file.start != start:
            self._file.append("start", start)

    def run(self, wanted: Sequence[tuple[Arm, int]], width: int) -> None:
        """Execute the wanted runs without a result, at most ``width`` at a time."""
        done = {(result.arm, result.seed) for result in self._file.results}
        waiting = [one for one in wanted if one not in done]
        self._bar.total = (self._bar.total or 0) + len(wanted)
        self._bar.update(len(wanted) - len(waiting))
        running: list[Future[Result]] = []
        try:
            while waiting or running:
                while waiting and len(running) < width:
                    arm, seed = waiting.pop(0)
                    self._bar.set_postfix_str(f"{label(arm)}, seed {seed}")
                    job = attrs.evolve(self._job, arm=arm, seed=seed)
                    running.append(self._submit(job))
                completed = wait(running, return_when=FIRST_COMPLETED).done
                for future in [one for one in running if one in completed]:  # a set has no order
                    running.remove(future)
                    result = future.result()
                    self._check_pairing(result)
                    self._file.append("result", result)
                    self._bar.update()
        finally:
            for future in running:
                future.cancel()

    def search(self, width: int) -> Study:
        """Execute what a greedy search needs, and then its proposal with the seeds held out; return the study."""
        study = Study(self.settings, self._file.results, self._file.start)
        if not self.settings.held_out:
            return study
        while arms := study.next_round()[1]:
            self.run([(arm, seed) for seed in self.settings.seeds for arm in arms], width)
            study = Study(self.settings, self._file.results, self._file.start)
        if study.proposal:
            self.run([(arm, seed) for seed in self.settings.held_out for arm in ((), study.proposal)], width)
        return Study(self.settings, self._file.results, self._file.start)

    def _start(self, arm: Arm, seed: int) -> Result:
        """Return the start of a run, which is executed once."""
        if (arm, seed) not in self._starts:
            job = attrs.evolve(self._job, arm=arm, seed=seed, only_start=True)
            start = self._submit(job).result()
            if start.failure is not None:
                raise StudyError(
                    f"make_trainer must return a trainer that trains, but {label(arm)} with seed {seed} failed in its "
                    f"first batches: {start.failure} (see {job.run_folder / 'log.txt'})"
                )
            self._starts[arm, seed] = start
        return self._starts[arm, seed]

    def _check_pairing(self, result: Result) -> None:
        """Check that a run had the data and weights of the others of its seed, if necessary by starting one again."""
        if (result.arm, result.seed) in self._starts:
            self._check_repetition(result)
        for other in self._file.results:
            if other.failure is not None or result.failure is not None:
                continue
            # An algorithm may change the data set itself, which is no error: only a repetition shows the cause.
            if other.seed == result.seed and result.differences(other):
                self._check_repetition(other)
            if other.arm == result.arm and other.seed != result.seed:
                _check_seeds(result, other)

    def _check_repetition(self, result: Result) -> None:
        differences = result.differences(self._start(result.arm, result.seed))
        if differences:
            raise StudyError(
                "make_trainer must give the same training for the same seed, but the "
                f"{differences[0]} of {label(result.arm)} with seed {result.seed} differ when it is repeated"
                + ("" if result.failure is None else f" ({result.failure})")
                + ". Runs share a state, such as a file or a folder of checkpoints, or draw from a generator that "
                "is not seeded: construct everything in make_trainer, from its seed."
            )


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


def _check_settings(make_trainer: Any, mode: str | None, clock: str, processes: int | None) -> None:
    """Check the arguments of :func:`ablate` that no other object checks."""
    if mode is not None:
        check_choice("mode", mode, "max", "min")
    check_choice("clock", clock, *CLOCKS)
    if processes is not None:
        check_whole("processes", processes, 1, "It is the number of runs at a time.")
    require_product("scipy", "ablation")
    try:
        signature = inspect.signature(make_trainer)
        signature.bind([], 0, **({"folder": ""} if "folder" in signature.parameters else {}))
    except TypeError as error:
        parameters = f" with the parameters {inspect.signature(make_trainer)}" if callable(make_trainer) else ""
        raise TypeError(
            f"make_trainer must be a function f(algorithms, seed) or f(algorithms, seed, folder), got "
            f"{shortened(make_trainer)}{parameters}: {error}."
        ) from None


def _check_arguments(make_trainer: Callable[..., Trainer], algorithms: Mapping[str, Any], arms: Sequence[Arm]) -> None:
    """Check that ``make_trainer`` takes the arguments of each method, and that no arm has two values of one."""
    signature = inspect.signature(make_trainer)
    options = {name: one for name, one in algorithms.items() if isinstance(one, Mapping)}
    for name, one in options.items():
        try:
            signature.bind_partial([], 0, **one)
        except TypeError as error:
            raise TypeError(
                f"algorithms[{name!r}] must be arguments of make_trainer, which has the parameters {signature}, got "
                f"{shortened(dict(one))}: {error}."
            ) from None
    for arm in arms:
        keys = [key for name in arm for key in options.get(name, ())]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ValueError(
                f"arms must have one value of each argument of make_trainer, but {label(arm)} sets {twice!r} twice."
            )


def _describe(algorithms: Mapping[str, Callable[[], Algorithm] | Mapping[str, Any]]) -> dict[str, str]:
    """Return the class and settings of each algorithm as strings, which identify it when a study is continued."""
    if not isinstance(algorithms, Mapping):
        raise TypeError(f"algorithms must be a dictionary of functions by name, got {shortened(algorithms)}.")
    described = {}
    for name, factory in algorithms.items():
        if not isinstance(name, str) or not name.strip() or name == "baseline" or "\n" in name:
            raise ValueError(f"algorithms must have names that are strings, other than 'baseline', got {name!r}.")
        if isinstance(factory, Mapping):
            described[name] = ", ".join(f"{key}={value!r}" for key, value in plain_settings(factory).items())
            continue
        if isinstance(factory, Algorithm) or not callable(factory):
            raise TypeError(
                f"algorithms[{name!r}] must be a function that constructs a new algorithm for each run, or a "
                f"dictionary of arguments of make_trainer, got {shortened(factory)}. "
                f"Write lambda: {type(factory).__name__}(…)."
            )
        algorithm = factory()
        if not isinstance(algorithm, Algorithm):
            raise TypeError(f"algorithms[{name!r}] must construct an Algorithm, got {shortened(algorithm)}.")
        options = ", ".join(f"{key}={value}" for key, value in plain_settings(settings_of(algorithm)).items())
        described[name] = f"{type(algorithm).__name__}({options})"
    return described


def _to_seeds(seeds: int | Sequence[int], name: str = "seeds") -> tuple[int, ...]:
    given = tuple(range(seeds)) if isinstance(seeds, int) and not isinstance(seeds, bool) else seeds
    if not isinstance(given, Sequence) or not all(type(seed) is int and 0 <= seed < 2**32 for seed in given):
        raise TypeError(f"{name} must be a number of seeds or a list of whole numbers below 2**32, got {seeds!r}.")
    if not given or len(set(given)) != len(given):
        raise ValueError(f"{name} must be at least one, and different from each other, got {seeds!r}.")
    return tuple(given)


def _to_held_out(
    given: Sequence[int] | None, seeds: Sequence[int], arms: Any, stored: Settings | None
) -> tuple[int, ...]:
    """Return the seeds for the proposal of a search: by default the stored ones, or as many as ``seeds``, behind them.

    Raises:
        ValueError: There is no search, or one has used a seed, which has favoured the arm that it would judge.
    """
    used, kept = {*seeds, *(stored.seeds if stored else ())}, stored.held_out if stored else ()
    if given is None:
        behind = tuple(range(max(used) + 1, max(used) + 1 + len(seeds)))
        return () if "greedy" not in arms else behind if {*kept} & used else kept or behind
    if "greedy" not in arms:
        raise ValueError(f"held_out is for arms='greedy', whose proposal is measured with it, got arms={arms!r}.")
    chosen = _to_seeds(given, "held_out")
    if common := sorted({*chosen} & used):
        raise ValueError(
            f"held_out must be seeds that the search does not use, but it has {common}, which have favoured the arm "
            "that they would judge. Choose other seeds, or another folder."
        )
    return chosen

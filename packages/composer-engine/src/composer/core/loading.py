"""Loading a saved state: everything is checked first, and algorithms that the weights need are made again."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch

from composer.core import model_state
from composer.core.engine import Engine, PassAt
from composer.core.event import Event
from composer.core.load_report import Findings, LoadReport, StateMismatchError
from composer.core.logger import Logger, LoggerDestination
from composer.core.passes import AlgorithmPass
from composer.core.plan import explain
from composer.core.registry import rebuild_algorithm
from composer.core.saved_state import COMPONENTS, check_part, check_state, components_by_key, malformed, stays
from composer.core.serialization import field_types, read_field, saved_fields

if TYPE_CHECKING:
    from composer.core.algorithm import Algorithm
    from composer.core.state import State

__all__ = [
    "CheckedState",
    "Passes",
    "check",
    "check_model",
    "load_model",
    "load_optimizers",
    "load_state",
]

Passes: TypeAlias = AlgorithmPass | PassAt | Sequence[AlgorithmPass | PassAt] | None


def load_state(
    state: State,
    saved: Any,
    logger: Logger | None,
    *,
    strict: bool,
    excluded: Collection[str],
    passes: Passes,
) -> LoadReport:
    """Check all of a saved state, then load it; see :meth:`State.load_state_dict`."""
    checked = check(state, saved, strict=strict, excluded=excluded, passes=passes)
    checked.load(logger)
    return checked.report


@attrs.frozen(eq=False)
class CheckedState:
    """A saved state that fits a run, and what of the run has to be made anew for it.

    Args:
        state: The run.
        saved: What was saved.
        report: What loading it does.
        made: Algorithms that the saved weights need and the run lacks, by their place in the list.
        passes: Passes that order them.
        put: What puts it into the run, of which nothing is checked any more.
    """

    state: State
    saved: Mapping[str, Any]
    report: LoadReport
    made: dict[int, Algorithm]
    passes: Passes
    put: Callable[[State, Mapping[str, Any]], None]

    def load(self, logger: Logger | None) -> None:
        """Load it, and warn of what differs; the run must be as it was when it was checked."""
        _add(self.state, self.made, logger, self.passes)
        self.put(self.state, self.saved)
        _warn(self.report, stacklevel=5)


def check(state: State, saved: Any, *, strict: bool, excluded: Collection[str], passes: Passes) -> CheckedState:
    """Check all of a saved state, and change nothing; see :meth:`State.load_state_dict`."""
    made = _missing_algorithms(state, saved, excluded) if isinstance(saved, Mapping) and "model" in saved else {}
    report = check_state(_trial_state(state, made, passes), saved, strict=strict)
    return CheckedState(state, saved, report, made, passes, _load_state)


def load_model(
    state: State,
    saved: Mapping[str, Any],
    logger: Logger | None,
    *,
    strict: bool,
    excluded: Collection[str],
    passes: Passes,
) -> LoadReport:
    """Check a model's weights, then load them; see :meth:`State.load_model_state`."""
    checked = check_model(state, saved, strict=strict, excluded=excluded, passes=passes)
    checked.load(logger)
    return checked.report


def check_model(
    state: State, saved: Mapping[str, Any], *, strict: bool, excluded: Collection[str], passes: Passes
) -> CheckedState:
    """Check a model's weights, and change nothing; see :meth:`State.load_model_state`."""
    findings = Findings()
    made = _missing_algorithms(state, saved, excluded)
    check_part(_trial_state(state, made, passes), "model", saved.get("model"), findings)
    return CheckedState(state, saved, findings.report(strict=strict), made, passes, _load_weights)


def load_optimizers(state: State, saved: Mapping[str, Any], *, strict: bool) -> LoadReport:
    """Check the state of optimizers, then load it; see :meth:`State.load_optim_state`."""
    findings = Findings()
    check_part(state, "optimizers", saved.get("optimizers"), findings)
    report = findings.report(strict=strict)
    model_state.load_optimizers(state.model, state.optimizers, saved["optimizers"])
    _warn(report)
    return report


def _warn(report: LoadReport, stacklevel: int = 4) -> None:
    if report.differences:
        lines = "\n- ".join(["The saved state was loaded, and this run differs from it:", *report.differences])
        warnings.warn(lines, UserWarning, stacklevel=stacklevel)


def _missing_algorithms(state: State, saved: Mapping[str, Any], excluded: Collection[str]) -> dict[int, Algorithm]:
    """Return new algorithms for those that the saved weights need and the run lacks, by their place in the list.

    Raises:
        StateMismatchError: The saved list of algorithms is malformed, or one cannot be made again from its name and
            settings.
    """
    records = saved.get("algorithms", [])
    problems, made = malformed("algorithms", records), {}
    own = components_by_key(state, "algorithms")
    for place, record in enumerate(() if problems else records):
        is_excluded = record["key"] in excluded or record["name"] in excluded
        if record["required_on_load"] and record["key"] not in own and not is_excluded:
            try:
                algorithm = rebuild_algorithm(record)
            except ValueError as error:
                problems.append(f"algorithms.{record['key']}, which the weights need: {error}")
                continue
            if algorithm.required_on_load():  # a checkpoint alone cannot add algorithms to a run
                made[place] = algorithm
    if problems:
        raise StateMismatchError(problems)
    return made


def _trial_state(state: State, made: dict[int, Algorithm], passes: Passes) -> State:
    """Return a state as it would be with the new algorithms, of copies of what they change; itself without such."""
    if not made:
        return state
    model, optimizers, copies = copy.deepcopy((state.model, state.optimizers, made))
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        explain(_inserted(state.algorithms, copies))
        changed = _operate(_like(state, model=model, optimizers=optimizers), copies, None, passes)
    return _like(changed, algorithms=_inserted(state.algorithms, copies), callbacks=state.callbacks)


def _add(state: State, made: dict[int, Algorithm], logger: Logger | None, passes: Passes) -> None:
    if made:
        changed = _operate(state, made, logger, passes)
        state.model, state.optimizers = changed.model, changed.optimizers
        state.made_on_load += made.values()
        state.algorithms = _inserted(state.algorithms, made)


def _inserted(algorithms: Iterable[Algorithm], made: Mapping[int, Algorithm]) -> list[Algorithm]:
    merged = list(algorithms)
    for place, algorithm in sorted(made.items()):
        merged.insert(place, algorithm)
    return merged


class _Relay(LoggerDestination):
    """Hands on what is logged, and takes no part in a run."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        self._logger.log_hyperparameters(hyperparameters)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._logger.log_metrics(metrics, step)


def _like(state: State, **changes: Any) -> State:
    return attrs.evolve(state, **changes)


def _operate(state: State, made: dict[int, Algorithm], logger: Logger | None, passes: Passes) -> State:
    """Let new algorithms, and no others, change the model; return the state with what they made of it."""
    changed = _like(state, algorithms=[*made.values()], callbacks=())
    # Not with the logger itself, whose destinations would be called at these events a second time.
    engine = Engine(changed, Logger(changed, _Relay(logger)) if logger else None, passes)
    for event in (Event.INIT, Event.BEFORE_LOAD):
        engine.run_event(event)
    return changed


def _load_state(state: State, saved: Mapping[str, Any]) -> None:
    """Load what has been checked: first components, which may still have a reason of their own to refuse."""
    loaded: list[str] = []
    for kind in COMPONENTS:
        records = {record["key"]: record["state"] for record in saved[kind]}
        for key, component in components_by_key(state, kind).items():
            if key in records:
                saved_one = records[key] if kind != "schedulers" else _for_scheduler(component, records[key])
                _load_component(f"{kind}.{key}", component, saved_one, loaded)
    if state.scaler is not None and saved["scaler"]:
        state.scaler.load_state_dict(saved["scaler"])
    if "model" in saved:
        model_state.load_weights(state.model, saved["model"])
    if "optimizers" in saved:
        model_state.load_optimizers(state.model, state.optimizers, saved["optimizers"])
    types = field_types(type(state))
    for name, field in saved_fields(type(state)).items():
        if not stays(field, getattr(state, field.name)):
            setattr(state, field.name, read_field(field, types[field.name], saved[name], name))
    state.restart_draws()


def _load_weights(state: State, saved: Mapping[str, Any]) -> None:
    model_state.load_weights(state.model, saved["model"])


def _load_component(path: str, component: Any, saved: dict[str, Any], loaded: list[str]) -> None:
    try:
        component.load_state_dict(saved)
    except Exception as error:
        error.add_note(f"{path} refused what was saved, though nothing had been found wrong with it before.")
        if loaded:
            error.add_note(f"Loaded already: {', '.join(loaded)}. Make these objects anew before you go on.")
        raise
    loaded.append(path)


def _for_scheduler(scheduler: Any, saved: dict[str, Any]) -> dict[str, Any]:
    # A scheduler makes whatever it is given its own attribute, under any name.
    own = scheduler.state_dict()
    return {name: _as_kept(own[name], value) for name, value in saved.items() if name in own}


def _as_kept(kept: Any, value: Any) -> Any:
    """Return a value with dictionaries of the kinds that ``kept`` has at the same places."""
    if isinstance(kept, Counter) and isinstance(value, dict):
        return Counter(value)
    if isinstance(kept, dict) and isinstance(value, dict):
        return {key: _as_kept(kept.get(key), item) for key, item in value.items()}
    if isinstance(kept, list) and isinstance(value, list) and len(kept) == len(value):
        return [_as_kept(one, item) for one, item in zip(kept, value, strict=True)]
    return value

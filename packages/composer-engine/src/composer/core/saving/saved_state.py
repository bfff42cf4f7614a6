"""What a run saves of its state, and how all of a saved state is compared before any of it is loaded.

A save calls :func:`state_to_save`, which ``State.state_dict`` returns encoded for other programs. A load has three
steps: :func:`add_missing_algorithms` lets algorithms that the weights need and the run lacks change the model, when all
else fits, because only then their layers can be compared; :func:`compare` reports every mismatch in one error, and
changes nothing; :func:`apply` loads.
"""

from __future__ import annotations

import types
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import attrs

from composer.core.checks import abridged, bulleted, caller_level, from_first_difference, nearest, to_strings
from composer.core.declarations import check_conflicts
from composer.core.optimizers import unwrapped
from composer.core.passes import all_passes
from composer.core.saving import model_state
from composer.core.saving.codec import NotSerializableError, Record, equal, plain
from composer.core.saving.components import by_key, is_unsaved, read_field, saved_fields, settings_to_save
from composer.core.saving.records import from_data, read
from composer.core.time import Timestamp

if TYPE_CHECKING:
    from composer.core.passes import AlgorithmPass, Passes

VERSION = 1
"""The schema of what :meth:`State.state_dict` returns; a higher one is of a later release."""


class SavableState(Protocol):
    """What saving and loading need of a :class:`State`, whose module imports this one."""

    device: Any
    model: Any
    optimizers: Any
    schedulers: Any
    scaler: Any
    algorithms: Any
    callbacks: Any

    def component_key(self, component: Any) -> str:
        """Return the key of an algorithm or callback."""

    def restart_draws(self) -> None:
        """Seed every generator again."""

    def rebuild_algorithm(self, name: str, settings: Mapping[str, Any]) -> Any:
        """Return a new algorithm from its saved name and settings, or raise a ValueError."""

    def after_surgery(
        self, algorithms: Sequence[Any], passes: Sequence[AlgorithmPass], logger: Any = None
    ) -> SavableState:
        """Return this state with these algorithms only, after they have changed its model."""


class StateMismatchError(ValueError):
    """A saved state does not fit; nothing of it has been loaded. ``problems`` has a sentence for each difference."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(map(abridged, problems))
        title = "The saved state does not fit this run, and nothing of it has been loaded:"
        super().__init__(bulleted(title, self.problems))


@attrs.frozen
class LoadReport:
    """The effects of loading a saved state; each line is a sentence or a path.

    Args:
        restored: The paths of what is loaded.
        overridden: Values of this run that are kept although others were saved.
        missing: What this run has and the saved state lacks; it starts from its initial state.
        unexpected: What was saved and this run lacks; it is ignored.
        changed: Settings that differ.

    Example:
        >>> print(LoadReport(restored=("timestamp",), changed=("algorithms.MixUp.alpha: 0.2 was saved, 0.4 is set.",)))
        restored: timestamp
        changed: algorithms.MixUp.alpha: 0.2 was saved, 0.4 is set.
    """

    restored: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[str, ...]:
        """All differences from the saved run that may change its results."""
        return (*self.missing, *self.unexpected, *self.changed)

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {', '.join(lines) if name == 'restored' else ' '.join(lines)}"
            for name, lines in attrs.asdict(self).items()
            if lines
        )


@attrs.define
class _Findings:
    """What comparing a saved state finds: the lines of the report on loading it, and why that is impossible."""

    restored: list[str] = attrs.Factory(list)
    overridden: list[str] = attrs.Factory(list)
    missing: list[str] = attrs.Factory(list)
    unexpected: list[str] = attrs.Factory(list)
    changed: list[str] = attrs.Factory(list)
    problems: list[str] = attrs.Factory(list)

    def report(self, added: Iterable[Any], *, strict: bool) -> LoadReport:
        """Return the report, or raise a StateMismatchError if there are problems; if ``strict``, any difference is.

        Args:
            added: The algorithms that have changed the model for the comparison.
            strict: Whether differences are problems.
        """
        lines = {field.name: tuple(map(abridged, getattr(self, field.name))) for field in attrs.fields(LoadReport)}
        report = LoadReport(**lines)
        problems = [*self.problems, *(report.differences if strict else ())]
        if problems:
            names = ", ".join(type(algorithm).__name__ for algorithm in added)
            problems += (
                [f"The weights need {names}, and the model has its layers now: create it again."] if names else []
            )
            raise StateMismatchError(problems)
        return report


@attrs.frozen
class SchedulerRecord(Record):
    """What is saved of a learning rate scheduler."""

    key: str
    state: dict[Any, Any]


@attrs.frozen
class CallbackRecord(SchedulerRecord):
    """What is saved of a callback."""

    name: str
    settings: dict[Any, Any]


@attrs.frozen
class AlgorithmRecord(CallbackRecord):
    """What is saved of an algorithm."""

    required_on_load: bool


_RECORDS: Mapping[str, type] = {
    "algorithms": AlgorithmRecord,
    "callbacks": CallbackRecord,
    "schedulers": SchedulerRecord,
}
"""The kinds of components, by the names of their lists in a state and in a saved one."""


def state_to_save(state: SavableState) -> dict[str, Any]:
    """Return what a run saves, without the weights of its model and the state of its optimizers."""
    data: dict[str, Any] = {"version": VERSION}
    for name, field in saved_fields(type(state)).items():
        value = getattr(state, field.name)
        value = dict(value) if isinstance(value, dict) else value  # without the further keys of MetricValues
        data[name] = plain(value.state_dict() if isinstance(value, Timestamp) else value, name)
    for kind in _RECORDS:
        data[kind] = [_component_to_save(kind, key, component) for key, component in _components(state, kind).items()]
    data["scaler"] = None if state.scaler is None else plain(state.scaler.state_dict(), "scaler")
    return data


def decode_state(saved: Any) -> Any:
    """Return a state that :func:`~composer.core.to_data` has encoded; model and optimizers have their own methods.

    Raises:
        StateMismatchError: It is not so encoded.
    """
    parts = {name: saved[name] for name in ("model", "optimizers") if name in saved} if isinstance(saved, dict) else {}
    try:
        data = from_data({name: value for name, value in saved.items() if name not in parts} if parts else saved)
        return data | parts if parts else data
    except ValueError as error:
        raise StateMismatchError([str(error)]) from None


def _component_to_save(kind: str, key: str, component: Any) -> dict[str, Any]:
    """Return the fields of the record of a component."""
    name, path = type(component).__name__, f"{kind}.{key}"
    try:
        state = component.state_dict()
    except NotSerializableError as error:
        raise NotSerializableError(f"{path}.{error.path.removeprefix(f'{name}.')}", error.reason) from None
    data = {"key": key, "state": plain(state, f"{path}.state")}
    if kind != "schedulers":
        data |= {"name": name, "settings": settings_to_save(component)}
    return data | ({"required_on_load": component.required_on_load()} if kind == "algorithms" else {})


def _components(state: SavableState, kind: str) -> dict[str, Any]:
    """Return the components of a kind by their keys."""
    if kind == "schedulers":
        return by_key(state.schedulers)
    return {state.component_key(component): component for component in getattr(state, kind)}


def add_missing_algorithms(
    state: SavableState,
    saved: Any,
    *,
    weights_only: bool = False,
    ignored: Collection[str] = (),
    strict: bool = False,
    excluded: Collection[str] = (),
    passes: Passes = None,
    logger: Any = None,
) -> list[Any]:
    """Add the algorithms that the saved weights need and a run lacks, let them change its model, and return them.

    Nothing is changed unless all else fits.

    Args:
        state: The run.
        saved: The saved state.
        weights_only: Whether nothing but the weights is compared; see :func:`compare`.
        ignored: The paths of what is not loaded; see there.
        strict: Whether any difference is an error.
        excluded: Algorithms not to construct.
        passes: Passes that order the constructed ones.
        logger: The logger of these.

    Raises:
        StateMismatchError: Something else does not fit; or they cannot be constructed, conflict with those of the run,
            or cannot change the model.
    """
    listed = saved.get("algorithms") if isinstance(saved, dict) and "model" in saved else None
    if not isinstance(listed, list) or not any(isinstance(one, dict) and one.get("required_on_load") for one in listed):
        return []
    components = {} if weights_only else _read_components(state, saved, ignored)
    records = components.get("algorithms") or _read_records("algorithms", listed)
    made = _rebuild_missing(state, records, to_strings("exclude_algorithms", excluded))
    if not made:
        return []
    merged = list(state.algorithms)
    for index, algorithm in sorted(made.items()):
        merged.insert(index, algorithm)
    if not weights_only:
        others = {name: part for name, part in saved.items() if name not in ("model", "optimizers")}
        compare(attrs.evolve(cast("Any", state), algorithms=merged), others, ignored=ignored, strict=strict)
    try:
        check_conflicts(merged)
        after = state.after_surgery([*made.values()], all_passes(passes), logger)
    except (ValueError, TypeError, RuntimeError, MemoryError) as error:
        raise StateMismatchError([f"algorithms, which the weights need: {error}"]) from error
    state.model, state.optimizers, state.algorithms = after.model, after.optimizers, merged
    return [*made.values()]


def compare(
    state: SavableState,
    saved: Any,
    *,
    weights_only: bool = False,
    ignored: Collection[str] = (),
    strict: bool = False,
    strict_weights: bool = False,
    added: Iterable[Any] = (),
) -> LoadReport:
    """Compare a saved state with a run, and return what :func:`apply` does; nothing is changed.

    Args:
        state: The run.
        saved: The saved state.
        weights_only: Whether nothing but the weights is compared.
        ignored: The paths of what is not loaded and not in ``saved``, such as ``"timestamp"``, ``"algorithms/EMA"``.
        strict: Whether any difference is an error.
        strict_weights: Whether missing and unexpected weights are.
        added: The algorithms that have changed the model for the comparison.

    Raises:
        StateMismatchError: Something cannot be loaded.
    """
    findings = _Findings()
    if not weights_only:
        records = _read_components(state, saved, ignored)
        _compare_fields(state, saved, findings)
        for kind in _RECORDS:
            if kind not in ignored:
                own = _components(state, kind)
                own = {key: component for key, component in own.items() if f"{kind}/{key}" not in ignored}
                _compare_components(kind, own, records[kind], findings)
        if "scaler" not in ignored:
            _compare_scaler(state, saved["scaler"], findings)
    for part in ("model",) if weights_only else ("model", "optimizers"):
        if weights_only or part in saved:
            is_strict = strict_weights and part == "model"
            _compare_tensors(state, part, saved.get(part), findings, ignored, strict=is_strict)
    return findings.report(added, strict=strict)


def _read_components(state: SavableState, saved: Any, ignored: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the records of components by kind and key, if this is a saved state at all."""
    version = saved.get("version") if isinstance(saved, dict) else None
    if type(version) is not int or version < 1:
        raise StateMismatchError(["It is not what State.state_dict() returns: it has no 'version'."])
    if version > VERSION:
        newer = f"version: {version} is of a later release, and this one reads up to {VERSION}; update composer-engine."
        raise StateMismatchError([newer])
    expected = ["version", *_RECORDS, "scaler", *saved_fields(type(state))]
    problems = [f"{name!r} is missing." for name in expected if name not in saved and name not in ignored]
    unknown = (name for name in saved if name not in (*expected, "model", "optimizers", "metadata"))
    problems += [f"{name!r} is unknown{nearest(name, expected)}" for name in unknown]
    records = {}
    for kind in _RECORDS:
        try:
            records[kind] = _read_records(kind, saved.get(kind, []))
        except StateMismatchError as error:
            problems += error.problems
    if problems:
        raise StateMismatchError(problems)
    return records


def _read_records(kind: str, data: Any) -> dict[str, Any]:
    try:
        records = read(data, types.GenericAlias(list, (_RECORDS[kind],)), kind)
    except ValueError as error:
        raise StateMismatchError([str(error)]) from None
    counts = Counter(record.key for record in records)
    repeated = [f"{kind}.{key} is there {count} times." for key, count in counts.items() if count > 1]
    if repeated:
        raise StateMismatchError(repeated)
    return {record.key: record for record in records}


def _rebuild_missing(
    state: SavableState, records: Mapping[str, AlgorithmRecord], excluded: Collection[str]
) -> dict[int, Any]:
    """Construct the algorithms that the saved weights need and the run lacks, and return them by their places."""
    own = _components(state, "algorithms")
    made, problems = dict[int, Any](), []
    for index, (key, record) in enumerate(records.items()):
        if record.required_on_load and key not in own and not {key, record.name} & {*excluded}:
            try:
                algorithm = state.rebuild_algorithm(record.name, record.settings)
            except ValueError as error:
                problems.append(f"algorithms.{key}, which the weights need: {error}")
                continue
            if algorithm.required_on_load():  # a checkpoint alone cannot add algorithms to a run
                made[index] = algorithm
    if problems:
        raise StateMismatchError(problems)
    return made


def _compare_fields(state: SavableState, saved: Mapping[str, Any], findings: _Findings) -> None:
    for name, field in saved_fields(type(state)).items():
        if name not in saved:
            continue
        try:
            value = read_field(type(state), field, saved[name], name)
        except ValueError as error:
            findings.problems.append(str(error))
            continue
        own = getattr(state, field.name)
        if not _is_kept(field, own):
            findings.restored.append(name)
        elif own != value:
            findings.overridden.append(f"{name}: {own} stays, {value} was saved.")


def _is_kept(field: attrs.Attribute[Any], own: Any) -> bool:
    """Return whether a field keeps the value that the program has set."""
    return bool(field.metadata.get("kept")) and own is not None


def _compare_components(kind: str, own: Mapping[str, Any], saved: Mapping[str, Any], findings: _Findings) -> None:
    if kind == "callbacks":  # those without settings and state may differ
        own = {key: one for key, one in own.items() if key in saved or settings_to_save(one) or one.state_dict()}
        saved = {key: one for key, one in saved.items() if key in own or one.settings or one.state}
    if_missing, if_unexpected = "is not saved, and starts from its initial state", "is saved, and this run has none"
    missing, unexpected = model_state.name_differences(own, saved, kind, if_missing, if_unexpected)
    findings.missing += missing
    findings.unexpected += unexpected
    findings.unexpected += [
        f"{kind}.{key} had averages to evaluate with, and this run evaluates with the training weights."
        for key in saved
        if key not in own and saved[key].state.get("averaged_weights")
    ]
    compare_one = _compare_scheduler if kind == "schedulers" else _compare_component
    for key in own:
        if key in saved:
            try:
                compare_one(f"{kind}.{key}", own[key], saved[key], findings)
            except (ValueError, TypeError) as error:
                findings.problems.append(f"{kind}.{key}: {error}")
            findings.restored.append(f"{kind}.{key}")


def _compare_scheduler(path: str, scheduler: Any, saved: SchedulerRecord, findings: _Findings) -> None:
    """Compare the names of the fields of a scheduler, which loads any state."""
    own = scheduler.state_dict()
    unexpected = [name for name in saved.state if name not in own]
    findings.unexpected += [f"{path}.{name} is saved, and this scheduler has no such field." for name in unexpected]


def _compare_component(path: str, component: Any, saved: CallbackRecord, findings: _Findings) -> None:
    """Compare the settings of an algorithm or callback, and raise an error if it cannot load its saved state."""
    name = type(component).__name__
    if saved.name != name:
        raise ValueError(f"is a {name}, and a {saved.name} was saved.")
    own = settings_to_save(component)
    for setting in {**own, **saved.settings}:
        was, now = saved.settings.get(setting, _ABSENT), own.get(setting, _ABSENT)
        if not equal(was, now):
            was, now = from_first_difference(_reported(was), _reported(now))
            findings.changed.append(f"{path}.{setting}: {was} was saved, {now} is set.")
    component.check_state_dict(saved.state)


_ABSENT = object()


def _reported(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    return str(value["unsaved"]) if is_unsaved(value) else f"{value!r:.80}"


def _compare_scaler(state: SavableState, saved: Any, findings: _Findings) -> None:
    own = None if state.scaler is None else state.scaler.state_dict()
    if saved is not None and not isinstance(saved, dict):
        findings.problems.append(f"scaler: must be a dictionary or None, got {type(saved).__name__}.")
    elif own is None and saved is not None:
        findings.unexpected.append("scaler: one was saved, and this run has none.")
    elif own is not None and saved is None:
        findings.missing.append("scaler: none was saved, and the loss scale starts from its initial value.")
    elif own is not None and saved is not None:
        expected, got = sorted(own), sorted(map(str, saved))
        findings.problems += [] if expected == got else [f"scaler: must hold {expected}, got {got}."]
        findings.restored.append("scaler")


def _compare_tensors(
    state: SavableState, part: str, saved: Any, findings: _Findings, ignored: Collection[str], *, strict: bool
) -> None:
    """Compare the saved ``"model"`` or ``"optimizers"`` with a state's; if ``strict``, other names are problems."""
    if not isinstance(saved, Mapping):
        findings.problems.append(f"{part}: must be a dictionary, got {type(saved).__name__}.")
        return
    if part == "model":
        own = model_state.weights(state.model)
        # Others may have saved buffers that this model has without saving them, such as the weights of a loss.
        buffers = {model_state.bare_name(name) for name, _ in model_state.bare_model(state.model).named_buffers()}
        saved = {name: weight for name, weight in saved.items() if name in own or name not in buffers}
        own = {name: weight for name, weight in own.items() if f"model/{name}" not in ignored}
        problems, missing, unexpected = model_state.check_weights(own, saved)
        findings.changed += model_state.changed_dtypes(own, saved)
    else:
        optimizers = by_key(map(unwrapped, state.optimizers))
        optimizers = {key: one for key, one in optimizers.items() if f"optimizers/{key}" not in ignored}
        problems, missing, unexpected = model_state.check_optimizers(state.model, optimizers, saved)
    findings.problems += problems
    if strict:
        findings.problems += missing + unexpected
    else:
        findings.missing += missing
        findings.unexpected += unexpected
    findings.restored.append(part)


def apply(state: SavableState, saved: Mapping[str, Any], report: LoadReport) -> LoadReport:
    """Load the parts that are in a compared state, and warn of differences; first those that may still reject it.

    Args:
        state: The run, which must not have changed since :func:`compare`.
        saved: The saved state, or some of its parts.
        report: What :func:`compare` returned.

    Raises:
        StateMismatchError: ``load_state_dict`` of an optimizer rejects its state.
    """
    if "optimizers" in saved:
        try:
            model_state.load_optimizers(state.model, state.optimizers, saved["optimizers"])
        except ValueError as error:
            raise StateMismatchError([str(error)]) from error
    for kind in _RECORDS:
        saved_states = {record["key"]: record["state"] for record in saved.get(kind, ())}
        for key, component in _components(state, kind).items() if saved_states else ():
            if key in saved_states:
                _load_component(kind, key, component, saved_states[key])
    if state.scaler is not None and saved.get("scaler"):
        state.scaler.load_state_dict(saved["scaler"])
    if "model" in saved:
        model_state.load_weights(state.model, saved["model"])
    for name, field in saved_fields(type(state)).items():
        if name in saved and not _is_kept(field, getattr(state, field.name)):
            setattr(state, field.name, read_field(type(state), field, saved[name], name))
    if "version" in saved:
        state.restart_draws()
    if report.differences:
        title = "The saved state was loaded, and this run differs from it:"
        warnings.warn(bulleted(title, report.differences), stacklevel=caller_level())
    return report


def load(state: SavableState, saved: Mapping[str, Any], *, strict: bool, **options: Any) -> LoadReport:
    """Load a saved state by the three steps of this module; the options are those of the first."""
    added = add_missing_algorithms(state, saved, strict=strict, **options)
    return apply(state, saved, compare(state, saved, strict=strict, added=added))


def _load_component(kind: str, key: str, component: Any, saved: dict[str, Any]) -> None:
    try:
        if kind == "schedulers":  # makes whatever it loads its own attribute, under any name
            own = component.state_dict()
            saved = {name: value for name, value in saved.items() if name in own}
        component.load_state_dict(saved)
    except Exception as error:
        error.add_note(
            f"{kind}.{key} raised an error on the saved state, although the check before had found no problem in it. "
            "The run is loaded in part: construct it again."
        )
        raise

"""What a run saves of its state, and how that is checked as a whole before any of it is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer.core import model_state
from composer.core.algorithm import Algorithm
from composer.core.checks import nearest
from composer.core.load_report import Findings, LoadReport
from composer.core.serialization import (
    NotSerializableError,
    field_types,
    is_unsaved,
    plain,
    read_field,
    saved_fields,
    settings_to_data,
    to_data,
)

if TYPE_CHECKING:
    import attrs

    from composer.core.callback import Callback
    from composer.core.state import State

__all__ = [
    "COMPONENTS",
    "VERSION",
    "check_part",
    "check_state",
    "components_by_key",
    "malformed",
    "state_to_data",
    "stays",
]

VERSION = 1
"""The schema of what :meth:`State.state_dict` returns; a higher one is of a later release."""

COMPONENTS = ("algorithms", "callbacks", "schedulers")
_PARTS = ("version", *COMPONENTS, "scaler")
_EXTRA = ("model", "optimizers")


def state_to_data(state: State) -> dict[str, Any]:
    """Return what a run saves, but for the weights of its model and the state of its optimizers."""
    types = field_types(type(state))
    return {
        "version": VERSION,
        **{
            name: to_data(_simplified(getattr(state, field.name)), types[field.name], name)
            for name, field in saved_fields(type(state)).items()
        },
        **{
            kind: [_component_to_data(kind, state.component_key(one), one) for one in getattr(state, kind)]
            for kind in ("algorithms", "callbacks")
        },
        "schedulers": [
            {"key": key, "state": plain(_simplified(scheduler.state_dict()), f"schedulers.{key}")}
            for key, scheduler in _schedulers(state).items()
        ],
        "scaler": None if state.scaler is None else plain(state.scaler.state_dict(), "scaler"),
    }


def _component_to_data(kind: str, key: str, component: Algorithm | Callback) -> dict[str, Any]:
    path = f"{kind}.{key}"
    try:
        state = component.state_dict()
    except NotSerializableError as error:
        inner = error.path.removeprefix(f"{type(component).__name__}.")
        raise NotSerializableError(f"{path}.{inner}", error.reason) from None
    record = {
        "key": key,
        "name": type(component).__name__,
        "settings": settings_to_data(component),
        "state": plain(state, f"{path}.state"),
    }
    return record | {"required_on_load": component.required_on_load()} if isinstance(component, Algorithm) else record


def _schedulers(state: State) -> dict[str, Any]:
    keys = model_state.numbered(type(scheduler).__name__ for scheduler in state.schedulers)
    return dict(zip(keys, state.schedulers, strict=True))


def _simplified(value: Any) -> Any:
    """Return plain dictionaries for those of other kinds, such as the Counter in torch's MultiStepLR."""
    if isinstance(value, Mapping):
        return {key: _simplified(item) for key, item in value.items()}
    return [_simplified(item) for item in value] if type(value) is list else value


def check_state(state: State, saved: Any, *, strict: bool = False) -> LoadReport:
    """Return what loading would do, and change nothing.

    Raises:
        StateMismatchError: Something cannot be loaded; or, if ``strict``, anything differs.
    """
    findings = Findings()
    _check_shape(state, saved, findings)
    findings.report(strict=False)
    _check_fields(state, saved, findings)
    for kind in COMPONENTS:
        _check_components(kind, components_by_key(state, kind), saved[kind], findings)
    _check_scaler(state, saved["scaler"], findings)
    for part in _EXTRA:
        if part in saved:
            check_part(state, part, saved[part], findings)
    return findings.report(strict=strict)


def _check_shape(state: State, saved: Any, findings: Findings) -> None:
    """Find out whether this is a saved state at all, so that the other checks can look into it."""
    version = saved.get("version") if isinstance(saved, dict) else None
    if type(version) is not int or version < 1:
        findings.problems.append("It is not what State.state_dict() returns: it has no 'version'.")
        return
    if version > VERSION:
        findings.problems.append(
            f"version: {version} is of a later release, and this one reads up to {VERSION}; update composer-engine."
        )
        return
    expected = [*_PARTS, *saved_fields(type(state))]
    findings.problems += [f"{name!r} is missing." for name in expected if name not in saved]
    findings.problems += [
        f"{name!r} is unknown{nearest(name, expected)}" for name in saved if name not in (*expected, *_EXTRA)
    ]
    for kind in COMPONENTS:
        findings.problems += malformed(kind, saved.get(kind, []))


def malformed(kind: str, records: Any) -> list[str]:
    """Return what is wrong with the saved records of some components."""
    wanted: dict[str, type] = {"key": str, "state": dict}
    if kind != "schedulers":
        wanted |= {"name": str, "settings": dict}
    if kind == "algorithms":
        wanted |= {"required_on_load": bool}
    if not isinstance(records, list):
        return [f"{kind}: must be a list, got {type(records).__name__}."]
    problems = [
        f"{kind}[{place}]: must be a dictionary of {', '.join(wanted)}."
        for place, record in enumerate(records)
        if not isinstance(record, dict)
        or record.keys() != wanted.keys()
        or any(not isinstance(record[name], one) for name, one in wanted.items())
    ]
    if problems:
        return problems
    keys = Counter(record["key"] for record in records)
    return [f"{kind}.{key} is there {count} times." for key, count in keys.items() if count > 1]


def _check_fields(state: State, saved: Mapping[str, Any], findings: Findings) -> None:
    types = field_types(type(state))
    for name, field in saved_fields(type(state)).items():
        try:
            value = read_field(field, types[field.name], saved[name], name)
        except ValueError as error:
            findings.problems.append(str(error))
            continue
        own = getattr(state, field.name)
        if stays(field, own) and own != value:
            findings.overridden.append(f"{name}: {own} stays, {value} was saved.")
        elif not stays(field, own):
            findings.restored.append(name)


def stays(field: attrs.Attribute[Any], own: Any) -> bool:
    """Return whether a field keeps the value that the program has given it."""
    return bool(field.metadata.get("kept")) and own is not None


def components_by_key(state: State, kind: str) -> dict[str, Any]:
    """Return the ``"algorithms"``, ``"callbacks"`` or ``"schedulers"`` of a state by their keys."""
    if kind == "schedulers":
        return _schedulers(state)
    return {state.component_key(one): one for one in getattr(state, kind)}


def _check_components(kind: str, own: Mapping[str, Any], records: list[dict[str, Any]], findings: Findings) -> None:
    saved = {record["key"]: record for record in records}
    only_own, only_saved = own.keys() - saved.keys(), saved.keys() - own.keys()
    findings.missing += [
        f"{kind}.{key} is not saved{nearest(key, only_saved, ', and begins anew.')}" for key in own if key in only_own
    ]
    findings.unexpected += [
        f"{kind}.{key} is saved, and this run has none{nearest(key, only_own)}" for key in saved if key in only_saved
    ]
    check = _check_scheduler if kind == "schedulers" else _check_component
    for key in own:
        if key in saved:
            check(f"{kind}.{key}", own[key], saved[key], findings)
            findings.restored.append(f"{kind}.{key}")


def _check_scheduler(path: str, scheduler: Any, record: Mapping[str, Any], findings: Findings) -> None:
    own = scheduler.state_dict()
    findings.problems += model_state.check_settings(path, own, record["state"])
    findings.unexpected += [
        f"{path}.{name} is saved, and this scheduler has no such field." for name in record["state"] if name not in own
    ]


def _check_component(path: str, component: Any, record: Mapping[str, Any], findings: Findings) -> None:
    if record["name"] != type(component).__name__:
        findings.problems.append(f"{path}: is a {type(component).__name__}, and a {record['name']} was saved.")
        return
    try:
        component.check_state_dict(record["state"])
    except (ValueError, TypeError) as error:
        findings.problems.append(f"{path}: {error}")
    own, saved = settings_to_data(component), record["settings"]
    for name in (*own, *(name for name in saved if name not in own)):
        was, now = saved.get(name, _ABSENT), own.get(name, _ABSENT)
        if not _equal(was, now):
            findings.changed.append(f"{path}.{name}: {_reported(was)} was saved, {_reported(now)} is set.")


_ABSENT = object()


def _reported(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    return str(value["unsaved"]) if is_unsaved(value) else f"{value!r:.80}"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if type(one) is type(other) and isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(item, other[key]) for key, item in one.items())
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    return one is other or bool(one == other) or (one != one and other != other)  # noqa: PLR0124  (not a number)


def _check_scaler(state: State, saved: Any, findings: Findings) -> None:
    if saved is not None and not isinstance(saved, dict):
        findings.problems.append(f"scaler: must be a dictionary or None, got {type(saved).__name__}.")
    elif state.scaler is not None and saved is None:
        findings.missing.append("scaler: none was saved, and the loss scale begins anew.")
    elif state.scaler is None and saved is not None:
        findings.unexpected.append("scaler: one was saved, and this run has none.")
    elif state.scaler is not None and saved is not None:
        wanted, held = sorted(state.scaler.state_dict()), sorted(map(str, saved))
        if wanted == held:
            findings.problems += model_state.check_settings("scaler", state.scaler.state_dict(), saved)
            findings.restored.append("scaler")
        else:
            findings.problems.append(f"scaler: must hold {wanted}, got {held}.")


def check_part(state: State, part: str, saved: Any, findings: Findings) -> None:
    """Compare the saved ``"model"`` or ``"optimizers"`` with those of a state."""
    if not isinstance(saved, Mapping):
        findings.problems.append(f"{part}: must be a dictionary, got {type(saved).__name__}.")
        return
    if part == "model":
        own = model_state.weights(state.model)
        wrong, missing, unexpected = model_state.check_weights(own, saved)
        findings.changed += model_state.changed_dtypes(own, saved)
    else:
        wrong, missing, unexpected = model_state.check_optimizers(state.model, state.optimizers, saved)
    findings.problems += wrong
    findings.missing += missing
    findings.unexpected += unexpected
    findings.restored.append(part)

"""Arguments of a trainer from plain data or a YAML file: names are looked up in registries, and nothing is imported."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from composer.core import Algorithm, Callback, LoggerDestination
from composer.core.checks import as_list, nearest, shortened, unknown_arguments
from composer.core.model_state import check_settings
from composer.loggers.products import import_product
from composer.trainer.reproducibility import seed_all


def _kind_of(base: type) -> Callable[[str, Any], bool]:
    return lambda _, one: inspect.isclass(one) and issubclass(one, base) and one is not base


def _is_optimizer(name: str, one: Any) -> bool:
    return name == "muon_with_adamw" or _kind_of(Optimizer)(name, one)


_REGISTRIES: Mapping[str, tuple[tuple[str, ...], Callable[[str, Any], bool]]] = {
    "model": (("composer.models",), lambda name, one: inspect.isfunction(one) and name.startswith("composer_")),
    "algorithms": (("composer.algorithms",), _kind_of(Algorithm)),
    "callbacks": (("composer.callbacks",), _kind_of(Callback)),
    "loggers": (("composer.loggers",), _kind_of(LoggerDestination)),
    "optimizers": (("composer.optim", "torch.optim"), _is_optimizer),
    "schedulers": (("composer.optim",), lambda name, one: inspect.isclass(one) and name.endswith("Scheduler")),
}
"""The modules whose public names a configuration may contain, by the argument of the trainer, and which of them."""
_KINDS: Mapping[str, tuple[Any, str]] = {
    "algorithms": (Algorithm, "Algorithm objects"),
    "loggers": (LoggerDestination, "LoggerDestination objects"),
    "callbacks": (Callback, "Callback objects"),
    "optimizers": (Optimizer, "torch.optim.Optimizer objects"),
    "schedulers": ((LRScheduler, Callable), "torch schedulers or functions f(state, ssr)"),
}
"""The types of the components by the argument, and their description."""
_NOT_BUILT = {"Callback", "LoggerDestination", "ComposerScheduler"}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_OBJECTS = ("train_dataloader", "eval_dataloader", "algorithm_passes", "profiler")
_MOST_ENTRIES = 10_000
_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Floats that YAML 1.1 reads as strings."""


def registered(argument: str) -> dict[str, Any]:
    """Return the classes and functions by name that a configuration may contain for an argument of the trainer.

    Example:
        >>> sorted(registered("model"))
        ['composer_timm', 'composer_torchvision']
    """
    modules, is_listed = _REGISTRIES[argument]
    public = [(name, getattr(module, name)) for module in map(import_module, modules) for name in module.__all__]
    return {name: one for name, one in public if name not in _NOT_BUILT and is_listed(name, one)}


def check_components(argument: str, components: object) -> None:
    """Raise a TypeError that names the correct call if something is of another kind than an argument of the trainer.

    Args:
        argument: The argument, such as ``"algorithms"``.
        components: One or several.

    Example:
        >>> check_components("algorithms", ["mixup"])
        Traceback (most recent call last):
        TypeError: algorithms must be Algorithm objects, got 'mixup'; write MixUp() of composer.algorithms.
    """
    kind, expected = _KINDS[argument]
    inner = {"optimizers": "model.parameters()", "schedulers": "..."}.get(argument, "")
    for one in as_list(components):
        if isinstance(one, type):
            raise TypeError(f"{argument} must be objects, got the class {one.__name__}; write {one.__name__}({inner}).")
        if isinstance(one, kind):
            continue
        others = ("algorithms", "loggers", "callbacks", "optimizers")
        hint = next((f"; give it as {name}=" for name in others if isinstance(one, _KINDS[name][0])), "")
        if isinstance(one, str):
            known = registered(argument)
            close = [name for name in known if one.casefold() in name.casefold()] if one else []
            close = close or difflib.get_close_matches(one, known, n=1)
            hint = "".join(
                f"; write {name}({inner}) of {known[name].__module__.rpartition('.')[0]}"
                for name in sorted(close, key=len)[:1]
            )
        raise TypeError(f"{argument} must be {expected}, got {shortened(one)}{hint}.")


def trainer_arguments(config: Mapping[str, Any] | str | os.PathLike[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trainer from a configuration, and those that are ``given`` as objects.

    Args:
        config: The arguments by name, as plain data, or the path of a YAML file with them.
        given: Further arguments; they replace those of the configuration.

    Raises:
        ModuleNotFoundError: PyYAML is not installed.
        TypeError: The configuration, or an entry, is of the wrong type.
        ValueError: A name is not registered, or an argument of a component is unknown, missing or out of range.
    """
    settings = {name: value for name, value in read_config(config).items() if name not in given}
    for name, value in settings.items():
        if name in _OBJECTS:
            raise ValueError(f"{name} cannot be in a configuration: give it as an argument of from_config.")
        _check_plain(value, str(name))
    arguments = {**settings, **given}
    if settings.get("model") is not None:
        # The Trainer seeds when the model exists, and its weights are drawn here.
        if isinstance(settings.get("seed"), int):
            seed_all(settings["seed"])
        (arguments["model"],) = _components("model", settings["model"])
    for argument in ("algorithms", "callbacks", "loggers", "schedulers", "optimizers"):
        if settings.get(argument) is not None:
            model = arguments.get("model")
            own: dict[str, Any] = {}
            if argument == "optimizers" and isinstance(model, torch.nn.Module):
                own = {"params": model.parameters(), "model": model}
            arguments[argument] = list(_components(argument, settings[argument], **own))
    return arguments


def read_config(
    config: Mapping[str, Any] | str | os.PathLike[str], overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a configuration as a dictionary, with entries replaced.

    Args:
        config: The arguments by name, as plain data, or the path of a YAML file with them.
        overrides: New values by path, such as ``{"optimizers.AdamW.lr": 0.001}``.

    Raises:
        ModuleNotFoundError: PyYAML is not installed.
        TypeError: The configuration is of the wrong type.
        ValueError: The file is not valid, or the configuration has no entry that a path leads through.

    Example:
        >>> read_config({"optimizers": ["AdamW"], "seed": 1}, {"optimizers.AdamW.lr": 0.1, "seed": 2})
        {'optimizers': [{'AdamW': {'lr': 0.1}}], 'seed': 2}
    """
    settings = dict(config) if isinstance(config, Mapping) else _read(config)
    for path, value in (overrides or {}).items():
        settings = _replaced(settings, str(path).split("."), value, path)
    return settings


def _replaced(entry: Any, names: list[str], value: Any, path: str) -> Any:
    """Return a copy of an entry in which the one that the names lead to is replaced."""
    if not names:
        return value
    name, *rest = names
    if entry == name:  # a component without arguments
        return {name: _replaced({}, rest, value, path)}
    if isinstance(entry, Mapping) and (name in entry or not rest):
        inner = {} if entry.get(name) is None else entry[name]
        return {**entry, name: _replaced(inner, rest, value, path)}
    for index, item in enumerate(entry) if isinstance(entry, (list, tuple)) else ():
        if item == name or (isinstance(item, Mapping) and name in item):
            return [*entry[:index], _replaced(item, names, value, path), *entry[index + 1 :]]
    has = sorted(map(str, entry)) if isinstance(entry, Mapping) else shortened(entry)
    raise ValueError(f"{path} must lead to an entry of the configuration, which has no {name!r} there, but {has}.")


def read_value(text: str) -> Any:
    """Return the value of a string as it would be in a YAML file: ``"1e-3"`` is a number.

    Example:
        >>> read_value("1e-3"), read_value("10ep"), read_value("[0.9, 0.95]")
        (0.001, '10ep', [0.9, 0.95])
    """
    return _parsed(text, shortened(text))


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"config must be a dictionary or the path of a YAML file, got {shortened(path)}.")
    settings = _parsed(Path(path).read_text(encoding="utf-8"), path)
    if not isinstance(settings, dict):
        raise TypeError(f"{path} must contain arguments of the Trainer by name, got a {type(settings).__name__}.")
    return settings


def _parsed(text: str, path: object) -> Any:
    yaml = import_product("yaml", "config")

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            # PyYAML silently uses the last of several equal keys.
            names = [key.value for key, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    raise yaml.YAMLError(f"{name!r} is set twice, {node.start_mark}")
            read: dict[Any, Any] = super().construct_mapping(node, deep)
            return read

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))
    try:
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None


def _check_plain(value: Any, place: str) -> None:
    """Reject what is not plain data, or so much of it that it repeats itself, as by aliases in YAML."""
    remaining = [(value, place)]
    for _ in range(_MOST_ENTRIES):
        if not remaining:
            return
        value, inner = remaining.pop()
        if isinstance(value, Mapping):
            remaining += [(name, inner) for name in value]
            remaining += [(item, f"{inner}.{name}") for name, item in value.items()]
        elif isinstance(value, (list, tuple)):
            remaining += [(item, f"{inner}[{index}]") for index, item in enumerate(value)]
        elif value is not None and not isinstance(value, (bool, int, float, str)):
            raise TypeError(
                f"{inner} must be a number, a string, a list or a dictionary, got {shortened(value)}. "
                "Give objects as arguments of from_config."
            )
    raise ValueError(f"{place} has more than {_MOST_ENTRIES:,} entries, or contains itself.")


def _components(argument: str, config: Any, **own: Any) -> Iterator[Any]:
    """Yield the components of an argument: names, or dictionaries of arguments by name."""
    for entry in config if isinstance(config, (list, tuple)) else [config]:
        if not isinstance(entry, (str, Mapping)):
            raise TypeError(
                f"{argument} must contain names, or names with arguments such as {{MixUp: {{alpha: 0.2}}}}, "
                f"got {entry!r}."
            )
        for name, settings in entry.items() if isinstance(entry, Mapping) else [(entry, None)]:
            yield _component(argument, name, settings, own)


def _component(argument: str, name: Any, settings: Any, own: Mapping[str, Any]) -> Any:
    known, place = registered(argument), f"{argument}.{name}"
    if name not in known:
        raise ValueError(f"{argument} must be of {', '.join(sorted(known))}, got {name!r}{nearest(str(name), known)}")
    if settings is not None and not isinstance(settings, Mapping):
        raise TypeError(f"{place} must be a dictionary of arguments, got {settings!r}.")
    for name_of_own in own.keys() & (settings or {}).keys():
        raise ValueError(f"{place}: {name_of_own} is set by the Trainer, leave it out.")
    # Only arguments with names: what **kwargs passes on to another library may be the path of a file to load.
    named = {key: one for key, one in inspect.signature(known[name]).parameters.items() if one.kind in _BY_NAME}
    values = {**(settings or {}), **{key: one for key, one in own.items() if key in named}}
    if not values.keys() <= named.keys():
        raise ValueError(f"{place} {unknown_arguments(values, named)}")
    missing = [key for key, one in named.items() if one.default is one.empty and key not in values]
    if missing:
        raise ValueError(f"{place} needs {', '.join(missing)}, got {sorted(settings or {}) or 'no arguments'}.")
    defaults = {key: one.default for key, one in named.items() if one.default is not one.empty}
    # torch compares settings of optimizers with numbers, and its error does not name the setting.
    for problem in check_settings(place, defaults, values) if argument == "optimizers" else ():
        raise ValueError(problem)
    if argument == "model" and ":" in str(values.get("model_name", "")):
        raise ValueError(
            f"{place}.model_name must be the name of a model, not a location, got {values['model_name']!r}."
        )
    try:
        return known[name](**values)
    except (TypeError, ValueError, ImportError, NotImplementedError) as error:
        raise ValueError(f"{place}: {error}") from error

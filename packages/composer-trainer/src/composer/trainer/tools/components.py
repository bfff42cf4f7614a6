"""The kinds of components that a trainer takes, and the correct call in the error for another object."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from composer.core import Algorithm, Callback, LoggerDestination
from composer.core.checks import as_list, shortened


def _kind_of(base: type) -> Callable[[str, Any], bool]:
    return lambda _, one: inspect.isclass(one) and issubclass(one, base) and one is not base


def _is_optimizer(name: str, one: Any) -> bool:
    return name == "muon_with_adamw" or _kind_of(Optimizer)(name, one)


_REGISTRIES: Mapping[str, tuple[tuple[str, ...], Callable[[str, Any], bool]]] = {
    "algorithms": (("composer.algorithms",), _kind_of(Algorithm)),
    "callbacks": (("composer.callbacks",), _kind_of(Callback)),
    "loggers": (("composer.loggers",), _kind_of(LoggerDestination)),
    "optimizers": (("composer.optim", "torch.optim"), _is_optimizer),
    "schedulers": (("composer.optim",), lambda name, one: inspect.isclass(one) and name.endswith("Scheduler")),
}
"""The modules with the public classes of each argument of the trainer, and which of their names are of it."""
_KINDS: Mapping[str, tuple[Any, str]] = {
    "algorithms": (Algorithm, "Algorithm objects"),
    "loggers": (LoggerDestination, "LoggerDestination objects"),
    "callbacks": (Callback, "Callback objects"),
    "optimizers": (Optimizer, "torch.optim.Optimizer objects"),
    "schedulers": ((LRScheduler, Callable), "torch schedulers or functions f(state, ssr)"),
}
"""The types of the components by the argument, and their description."""
_NOT_BUILT = {"Callback", "LoggerDestination", "ComposerScheduler"}


def registered(argument: str) -> dict[str, Any]:
    """Return the public classes and functions by name for an argument of the trainer.

    Example:
        >>> "MixUp" in registered("algorithms")
        True
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

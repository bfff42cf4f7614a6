"""The public names of the four packages, which the reference is generated from."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer

import composer


@functools.cache
def modules() -> list[str]:
    """Return the packages that list public names, and the modules of ``composer.integrations``."""
    found = ["composer"]
    for module in walk_packages(composer.__path__, "composer."):
        is_private = any(part.startswith("_") for part in module.name.split("."))
        if is_private or not (module.ispkg or module.name.startswith("composer.integrations.")):
            continue
        if getattr(import_module(module.name), "__all__", None):
            found.append(module.name)
    return found


def home(module: str, name: str) -> str:
    """Return the module that documents a name: the first public one on the path to its definition, or ``module``."""
    value = getattr(import_module(module), name)
    defined_in = getattr(value, "__module__", None) or module
    homes = [public for public in modules() if f"{defined_in}.".startswith(f"{public}.") and public != "composer"]
    homes = [public for public in homes if name in import_module(public).__all__]
    return max(homes, key=len, default=module)


def groups(module: str) -> dict[str, list[str]]:
    """Return the names that a module documents, by their kind, or in ``composer.functional`` by their folder."""
    result: dict[str, list[str]] = defaultdict(list)
    for name in import_module(module).__all__:
        if home(module, name) == module:
            result[_group(module, getattr(import_module(module), name))].append(name)
    return {title: sorted(result[title]) for title in sorted(result)}


def elsewhere(module: str) -> list[str]:
    """Return the names that a module offers and another one documents, with their full names there."""
    names = import_module(module).__all__
    return sorted(f"{home(module, name)}.{name}" for name in names if home(module, name) != module)


def comment(name: str) -> list[str]:
    """Return the lines of the comment after the definition of a value, which may be in another module."""
    module, _, name = name.rpartition(".")
    for defined_in in [imported for imported in sys.modules if f"{imported}.".startswith(f"{module}.")]:
        try:
            found = ModuleAnalyzer.for_module(defined_in).find_attr_docs().get(("", name))
        except PycodeError:
            continue
        if found:
            return found
    return []


def is_documented(kind: type) -> bool:
    """Return whether the reference, or that of another library, has a page for a class."""
    if not kind.__module__.startswith("composer."):
        return True
    return any(getattr(import_module(module), kind.__name__, None) is kind for module in modules())


def _group(module: str, value: object) -> str:
    if value is Any or not (inspect.isclass(value) or inspect.isroutine(value)):
        return "Types and data"
    if module == "composer.functional":
        return value.__module__.split(".")[2].capitalize()
    if inspect.isroutine(value):
        return "Functions"
    return "Exceptions and warnings" if issubclass(value, Exception) else "Classes"

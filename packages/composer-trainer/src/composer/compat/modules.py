"""Former modules and names of MosaicML Composer, found after the usual import has failed."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import composer
from composer.compat.table import Entry, entries, former_modules, imported_entry
from composer.functional import former_names

_GUIDE = "See docs/guides/moving_from_composer.md."
_SKIPPED = (
    str(Path(__file__).parent), composer.__file__, former_names.__file__, str(importlib.__file__), "<frozen importlib"
)  # fmt: skip
"""Beginnings of the names of files that only import for another one."""


def find_spec(name: str) -> ModuleSpec | None:
    """Return the spec of a former module; set a former name of an existing module as its attribute.

    The import system also searches for ``composer.core.JSON`` as a module in ``from composer.core import JSON``, if
    ``composer.core`` has no such attribute, and then reads the attribute again.

    Args:
        name: The dotted name of what could not be imported.

    Returns:
        The spec, or None if the name is not a former module.

    Raises:
        ImportError: The name is not available; the error contains what to use instead.
    """
    parent, _, last = name.rpartition(".")
    is_module = getattr(sys.modules.get(parent), "__path__", None) == []
    entry = _find(name, also_imported=is_module)
    if name in former_modules():
        return ModuleSpec(name, _Loader, origin="composer.compat", is_package=True)  # type: ignore[arg-type]
    if entry is not None:
        setattr(sys.modules[parent], last, _take(entry))
    elif hint := _place(parent, last):
        # Not the full name, because Python and this library ignore the error of a module that is missing.
        raise ModuleNotFoundError(f"cannot import name {last!r} from {parent!r}{hint}", name=last)
    return None


@functools.lru_cache  # a program may ask again and again by hasattr()
def _place(parent: str, name: str) -> str:
    """Return the end of a sentence with what to import instead of a name that a package does not have, if any."""
    homes = _public_names()
    if parent not in homes or name.startswith("_"):
        return ""
    from composer.core.checks import nearest  # noqa: PLC0415  (these are imported after a failed import only)
    from composer.trainer.tools.names import names_elsewhere  # noqa: PLC0415

    words, ours = sorted(name.casefold().split("_")), names_elsewhere().get(name)
    same = [(home, one) for home in homes for one in homes[home] if sorted(one.casefold().split("_")) == words]
    if same:
        return ": write from {} import {}.".format(*same[0])
    return nearest(name, homes[parent], "") if ours is None else f": use {ours}."


@functools.cache
def _public_names() -> dict[str, list[str]]:
    """Return the names in ``__all__`` of the packages, that of :mod:`composer` first; nothing is imported."""
    folders = [Path(composer.__file__).parent, *map(Path, composer.__path__)]
    found: dict[str, list[str]] = {}
    for file in [folders[0] / "__init__.py", *(one for at in folders for one in sorted(at.glob("*/__init__.py")))]:
        listed = re.search(r"^__all__[^=]*= (\[[^]]*\])", file.read_text("utf-8"), re.MULTILINE)
        names = file.parent.relative_to(file.parents[1] if file.parent in folders else file.parents[2])
        if listed:
            found[".".join(names.parts)] = ast.literal_eval(listed[1])
    return found


class _FormerModule(ModuleType):
    """A former module, whose names are looked up in the table when they are first used."""

    def __getattr__(self, name: str) -> Any:
        former = f"{self.__name__}.{name}"
        if name == "__all__":  # what `from composer.utils import *` imports
            names = (entry.former.removeprefix(f"{self.__name__}.") for entry in entries().values() if entry.module)
            return sorted(name for name in names if name.isidentifier() and not name.startswith("_"))
        if name.startswith("__") and former not in entries():
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if former in former_modules():
            return importlib.import_module(former)
        entry = _find(former, also_imported=True)
        if entry is None:
            raise ImportError(f"{former} is not available here, and has no known replacement. {_GUIDE}", name=former)
        alias = entries().get(self.__name__)
        is_covered = alias is not None and alias.module == entry.module and entry.name == name
        value = _take(entry, warn=not is_covered)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        prefix = f"{self.__name__}."
        names = {former.removeprefix(prefix) for former in entries() if former.startswith(prefix)}
        return sorted({*super().__dir__(), *(name for name in names if "." not in name)})


class _Loader:
    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _FormerModule(spec.name, f"Former names of {spec.name}; see :mod:`composer.compat`.")

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        entry = entries().get(module.__name__)
        if entry is not None:
            _warn(entry)


def _find(name: str, *, also_imported: bool) -> Entry | None:
    """Return the entry of a former name; raise an ImportError for one that is not available here."""
    entry = entries().get(name) or (imported_entry(name) if also_imported else None)
    if entry is not None and entry.module is None:
        raise ImportError(f"{entry.former} is not available here. {entry.change} {_GUIDE}", name=entry.former)
    return entry


def _take(entry: Entry, *, warn: bool = True) -> Any:
    if entry.name is None:
        return importlib.import_module(entry.former)
    value = getattr(importlib.import_module(str(entry.module)), str(entry.name))
    if warn:
        _warn(entry)
    return value


def _warn(entry: Entry) -> None:
    """Warn at the line outside of the import system that uses the name."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    if frame is None:  # imported by C code alone
        return
    home = "" if entry.advice else f" of {'.'.join(filter(None, [entry.module, entry.name]))}"
    warnings.warn_explicit(
        f"{entry.former} is a former name{home}. Replace it: {entry.change}",
        DeprecationWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )

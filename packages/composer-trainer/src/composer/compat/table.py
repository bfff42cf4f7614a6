"""Names of MosaicML Composer 0.32 that are elsewhere here, or not available; ``table.toml`` lists them."""

import functools
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

UNAVAILABLE = "composer.compat.unavailable"
"""The module of names that can be imported and not be used."""

_TABLE: dict[str, Any] = tomllib.loads(files("composer.compat").joinpath("table.toml").read_text("utf-8"))

NAMES: Mapping[str, Mapping[str, Sequence[str]]] = _TABLE["names"]
"""For each former module, the new modules and the names that are there; the file describes the forms of both."""

IMPORTED: Mapping[str, Sequence[str]] = _TABLE["imported"]
"""For each package of this library, its names that Composer's modules import from each other."""

ARGUMENTS: Mapping[str, Mapping[str, str]] = _TABLE["arguments"]
"""Arguments that are not accepted here, or without effect, by the last part of the called name."""

ATTRIBUTES: Mapping[str, str] = _TABLE["attributes"]
"""Methods of Composer's devices, which are :class:`torch.device` here."""


class Entry(NamedTuple):
    """A former name, and its new home or advice.

    Attributes:
        former: The former dotted name.
        module: The module that has it here; None if it is not available.
        name: Its name there; None if it is the module itself.
        advice: What to use instead, if it is not simply moved.

    Example:
        >>> Entry("composer.utils.string_enum.StringEnum", "enum", "StrEnum", None).change
        'from enum import StrEnum as StringEnum'
    """

    former: str
    module: str | None
    name: str | None
    advice: str | None

    @property
    def works(self) -> bool:
        """Whether a program that uses the name runs."""
        return self.module not in {None, UNAVAILABLE}

    @property
    def change(self) -> str:
        """What to write instead."""
        if self.advice is not None:
            return self.advice
        former = self.former.rpartition(".")[2]
        if self.name is not None:
            renamed = "" if self.name == former else f" as {former}"
            return f"from {self.module} import {self.name}{renamed}"
        package, _, last = str(self.module).rpartition(".")
        return f"from {package} import {last}" + ("" if last == former else f" as {former}")


def entries() -> Mapping[str, Entry]:
    """Return the table by former dotted name.

    Example:
        >>> entries()["composer.utils.dist"].module
        'composer.distributed'
    """
    return _entries()


@functools.cache
def _entries() -> dict[str, Entry]:
    return {entry.former: entry for entry in _expand()}


def imported_entry(name: str) -> Entry | None:
    """Return the entry of a name that a module of Composer imports from another one; None if there is none.

    Their names are distinct, so that all modules of Composer, but not its packages, have all names of the table.

    Example:
        >>> imported_entry("composer.trainer.trainer.Time").change
        'from composer.core import Time'
    """
    entry = _by_last_part().get(name.rpartition(".")[2]) if name.count(".") > 2 else None
    return entry._replace(former=name) if entry and entry.name else entry


@functools.cache
def _by_last_part() -> dict[str, Entry]:
    public = [Entry(name, home, name, None) for home, names in IMPORTED.items() for name in names]
    moved = [entry for entry in entries().values() if entry.name or entry.module]
    return {entry.former.rpartition(".")[2]: entry for entry in [*reversed(moved), *public]}


@functools.cache
def former_modules() -> frozenset[str]:
    """Return the former modules that have names, and the packages that contain them, without the new homes."""
    having = {entry.former.rpartition(".")[0] for entry in entries().values() if entry.name is not None}
    having |= {entry.former for entry in entries().values() if entry.module is not None and entry.name is None}
    homes = {entry.module for entry in entries().values() if entry.module is not None}
    homes.add("composer.checkpoint")  # a package that has no former name under another one
    return frozenset(_beginnings(having) - _beginnings(homes))


def _beginnings(names: Iterable[str]) -> set[str]:
    split = [name.split(".") for name in names]
    return {".".join(parts[:length]) for parts in split for length in range(1, len(parts) + 1)}


def _expand() -> Iterator[Entry]:
    for places, homes in NAMES.items():
        package, _, inner = places.rstrip("]").partition("[")
        for home, names in homes.items():
            module, advice = parse_home(home)
            for item in names:
                former, _, new = item.partition("=")
                if former == "*":
                    yield Entry(package + inner, module, None, advice)
                    continue
                for place in dict.fromkeys([package + inner, package]):
                    yield Entry(f"{place}.{former}", module, new or former, advice)
                if home == "composer.functional" and package.startswith("composer.algorithms."):
                    yield Entry(f"{package.rpartition('.')[0]}.{former}", module, new or former, None)


def parse_home(home: str) -> tuple[str | None, str | None]:
    """Return the module and the advice of a key of the table: ``module``, ``advice`` or ``module: advice``.

    Example:
        >>> parse_home("composer.compat.replacements: use list(...)")
        ('composer.compat.replacements', 'use list(...)')
    """
    if " " not in home:
        return home, None
    module, found, advice = home.partition(": ")
    return (module, advice) if found and " " not in module else (None, home)

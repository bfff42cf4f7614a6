"""Answers to a name that does not exist."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["suggest"]


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the known names that are most like this one; empty if none is.

    Example:
        >>> suggest("resnet81", ["resnet18", "resnet101", "vit_b_16"])
        " Did you mean 'resnet18' or 'resnet101'?"
        >>> suggest("bert", ["resnet18"])
        ''
    """
    found = [repr(near) for near in difflib.get_close_matches(name.lower(), list(known), n=3)]
    return f" Did you mean {' or '.join(found)}?" if found else ""

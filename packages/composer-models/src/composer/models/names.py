"""Errors for unknown names and missing optional dependencies."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the most similar known names; empty if there are none.

    Example:
        >>> suggest("resnet81", ["resnet18", "resnet101", "vit_b_16"])
        " Did you mean 'resnet18' or 'resnet101'?"
        >>> suggest("bert", ["resnet18"])
        ''
    """
    similar = [repr(near) for near in difflib.get_close_matches(name.lower(), list(known), n=3)]
    return f" Did you mean {' or '.join(similar)}?" if similar else ""


def import_extra(module: str, *, needed: str, extra: str) -> Any:
    """Import an optional dependency.

    Args:
        module: The name of the module.
        needed: The start of the error's sentence, such as ``"composer_timm needs timm"``.
        extra: The extra of composer-models that installs it.

    Raises:
        ModuleNotFoundError: It is not installed.

    Example:
        >>> import_extra("math", needed="composer_timm needs math", extra="timm").pi > 3
        True
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(f'{needed}: pip install "composer-models[{extra}]".') from error

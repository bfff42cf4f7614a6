"""Names that are filled in: what a run may be called, and what may stand in braces in the name of a file or folder."""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING, Any

from composer.core.checks import shortened, to_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["check_run_name", "fill_in"]

_BEGINS_ELSEWHERE = re.compile(r"[/\\]|[A-Za-z]:[/\\]|.*://", re.DOTALL)


class _Names(string.Formatter):
    """Looks values up by their whole names: no attributes, indices or positions."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        del args
        return kwargs[field_name], field_name


def check_run_name(name: object) -> None:
    """Refuse the name of a run that leads out of the folders that it is filled into.

    Raises:
        TypeError: It is no text.
        ValueError: It is empty, an absolute path or an address, or has ``..`` or a NUL character in it.

    Example:
        >>> check_run_name("team/first")
    """
    if not isinstance(name, str):
        raise TypeError(f"run_name must be a text, got {shortened(name)}.")
    if not name or "\0" in name or ".." in re.split(r"[/\\]", name) or _BEGINS_ELSEWHERE.match(name):
        raise ValueError(
            "run_name must be a name that folders can have, such as 'first' or 'team/first': not empty, without '..' "
            f"and NUL characters, no absolute path and no address, got {shortened(name)}."
        )


def fill_in(template: str, values: Mapping[str, object], parameter: str) -> str:
    """Return the name of a file or folder with values filled in for the names in braces.

    Args:
        template: The name; ``{batch:06}`` formats as :meth:`str.format` does.
        values: What may be in braces.
        parameter: Whose value the template is, for the error.

    Raises:
        TypeError: The name is neither a text nor a path.
        ValueError: Something else is in braces, or no file or folder can have the name.

    Example:
        >>> fill_in("{run_name}/ba{batch:04}", {"run_name": "first", "batch": 7}, "filename")
        'first/ba0007'
    """
    template = to_path(parameter, template)
    if not template or "\0" in template:
        raise ValueError(
            f"{parameter} must be the name of a file or folder ('.' is the current one), got {shortened(template)}."
        )
    try:
        return _Names().vformat(template, (), values)
    except (KeyError, IndexError, ValueError):
        *others, last = (f"{{{name}}}" for name in values)
        allowed = f"{', '.join(others)} and {last}" if others else last
        raise ValueError(
            f"{parameter} may have {allowed} in it, nothing else in braces, got {shortened(template)}."
        ) from None

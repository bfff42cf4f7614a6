"""Files that a run writes: names with fields of the run filled in, and atomic writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from composer.core.checks import shortened, to_path
from composer.core.state import State

UNFINISHED = ".unfinished-"
"""Prefix of the name of a file that :func:`write_atomically` is writing."""


def fill_in(template: str, values: Mapping[str, object], parameter: str) -> str:
    """Return the name of a file or folder with the names in braces replaced by their values.

    Args:
        template: The name; ``{batch:06}`` formats as :meth:`str.format` does.
        values: The values by their names.
        parameter: The name of the parameter, for the error.

    Raises:
        TypeError: The template is neither a string nor a path.
        ValueError: Another name is in braces, or the name is invalid for a file or folder.

    Example:
        >>> fill_in("{run_name}/ba{batch:04}", {"run_name": "first", "batch": 7}, "filename")
        'first/ba0007'
    """
    template = template if type(template) is str else to_path(parameter, template)
    if not template or "\0" in template:
        raise ValueError(
            f"{parameter} must be the name of a file or folder ('.' is the current one), got {shortened(template)}."
        )
    try:
        return template.format(**values)
    except (LookupError, ValueError, AttributeError):
        *others, last = (f"{{{name}}}" for name in values)
        allowed = f"{', '.join(others)} and {last}" if others else last
        raise ValueError(
            f"{parameter} may have {allowed} in it, nothing else in braces, got {shortened(template)}."
        ) from None


def fill_in_run(template: str, state: State, parameter: str = "A name", fields: Sequence[str] | None = None) -> str:
    """Return the name of a file or folder with fields of a run filled in.

    Args:
        template: The name; ``{batch:06}`` formats as :meth:`str.format` does.
        state: The run.
        parameter: The parameter that the template is the value of, for the error.
        fields: The fields that the template may contain. If None, ``run_name``, ``rank`` and all counts and times of
            the clock.

    Raises:
        TypeError: The template is neither a string nor a path.
        ValueError: The template contains another field, or is not a valid name.

    Example:
        >>> fill_in_run("{run_name}/ep{epoch}-ba{batch}.json", State(model=None, run_name="mine"))
        'mine/ep0-ba0.json'
    """
    clock = state.timestamp
    values = {
        "run_name": state.run_name,
        "rank": state.rank,
        **{name: int(value) for name, value in clock.state_dict().items() if not name.endswith("_wct")},
        "total_wct": clock.total_wct.total_seconds(),
    }
    return fill_in(template, values if fields is None else {name: values[name] for name in fields}, parameter)


class FileName(str):
    """The name of a file in a folder, with fields of a run, which also has the attributes of Composer's names of files.

    Args:
        filename: The name.
        folder: The folder, in which fields of a run are filled in, too.

    Example:
        >>> name = FileName("ep{epoch}", "{run_name}")
        >>> name.filename, name.folder, name.format(State(model=None, run_name="mine"))
        ('ep{epoch}', '{run_name}', 'mine/ep0')
    """

    folder: str

    def __new__(cls, filename: str, folder: str) -> FileName:
        """Return the name."""
        self = super().__new__(cls, filename)
        self.folder = folder
        return self

    filename = property(str.__str__)

    def format(self, *args: object, **kwargs: object) -> str:
        """Return the path of a run that is given, or else, as for a string, the name with values filled in."""
        if not args or not isinstance(args[0], State):
            return super().format(*args, **kwargs)
        path = f"{self.folder}/{self.filename}"
        return path if kwargs.get("keep_placeholders") else fill_in_run(path, args[0])


def check_template(template: str, parameter: str, fields: Sequence[str] | None = None) -> str:
    """Return a template for :func:`fill_in_run` as a string, and raise if it cannot be filled in.

    Raises:
        TypeError: The template is neither a string nor a path.
        ValueError: The template contains another field than ``fields``, or is not a valid name.

    Example:
        >>> check_template("ep{epoch}.json", "filename", ["epoch"])
        'ep{epoch}.json'
    """
    template = to_path(parameter, template)
    fill_in_run(template, State(model=None, run_name="run"), parameter, fields)
    return template


def write_atomically(write: Callable[[Path], object], path: Path) -> None:
    """Call ``write(unfinished)`` with another name in the same folder, and rename the file to ``path`` on success."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because only a rename within one file system is atomic.
    unfinished = path.with_name(f"{UNFINISHED}{path.name}")
    try:
        write(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)

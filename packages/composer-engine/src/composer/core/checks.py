"""Checks as validators of attrs fields, converters, the names of arguments, and words of errors."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import attrs

from composer.functional import checks

P = ParamSpec("P")
T = TypeVar("T")

_UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\ud800-\udfff]")
_LONGEST_FOLDER = 200
"""File systems have names of up to 255 bytes, and what is filled into names needs some of them."""
# Absolute paths of POSIX and of Windows, with and without a drive, and URLs.
_BEGINS_ELSEWHERE = re.compile(r"[/\\]|[A-Za-z]:[/\\]|.*://", re.DOTALL)
_LONGEST_NAME = 500
_MOST_LINES = 200
_LONGEST_LINE = 600


def by_name(
    check: Callable[Concatenate[str, Any, P], object], *args: P.args, **options: P.kwargs
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return an attrs validator that calls a check with the name of the argument and its value.

    Example:
        >>> attrs.make_class("Average", {"_count": attrs.field(validator=by_name(checks.check_whole, 1))})(0)
        Traceback (most recent call last):
        ValueError: count must be at least 1, got 0.
    """

    def validate(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        check(field.alias or field.name, value, *args, **options)

    validate.__doc__ = check.__doc__
    return validate


# Validators of attrs, as those that the functions below return.
is_flag = by_name(checks.check_flag)
is_string = by_name(checks.check_string)
is_subset = by_name(checks.check_subset)


def number_between(
    low: float, high: float = math.inf, *, meaning: str, above: bool = False, below: bool = False
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return an attrs validator: a finite number from ``low`` (or ``above`` it) to ``high`` (or ``below`` it)."""
    is_open = below or high == math.inf
    return by_name(checks.check_interval, low, high, meaning, open_low=above, open_high=is_open)


def whole_number_from(low: int, *, meaning: str) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return an attrs validator: a whole number, ``low`` or more."""
    return by_name(checks.check_whole, low, meaning)


def number(default: float | None, low: float, high: float = math.inf, **options: Any) -> Any:
    """Return an attrs field of a number that :func:`number_between` accepts; also None if this is the default.

    Example:
        >>> attrs.make_class("Average", {"smoothing": number(0.5, 0, 1, meaning="It is a weight.")})(2)
        Traceback (most recent call last):
        ValueError: smoothing must lie in [0, 1], got 2. It is a weight.
    """
    return _field(default, number_between(low, high, **options))


def integer(default: int | None, least: int, *, meaning: str, kw_only: bool | None = None) -> Any:
    """Return an attrs field of a whole number, ``least`` or more; also None if this is the default.

    It is passed by name if ``kw_only``; None leaves this to the class.
    """
    return _field(default, whole_number_from(least, meaning=meaning), kw_only)


def _field(
    default: float | None, check: Callable[[Any, attrs.Attribute[Any], Any], None], kw_only: bool | None = None
) -> Any:
    validator = attrs.validators.optional(check) if default is None else check
    return attrs.field(default=default, validator=validator, kw_only=kw_only)


def one_of(*choices: str) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return an attrs validator: one of the choices."""
    return by_name(checks.check_choice, *choices)


def own_arguments(kind: Any, arguments: Mapping[str, Any], *, without_none: bool = False) -> dict[str, Any]:
    """Return those of some arguments, by name, that a class of attrs declares.

    Example:
        >>> own_arguments(attrs.make_class("Average", ["_count"]), {"count": 3, "decay": 0.5})
        {'count': 3}
    """
    own = {field.alias or field.name for field in attrs.fields(kind) if field.init}
    return {name: one for name, one in arguments.items() if name in own and not (without_none and one is None)}


def as_list(given: T | Iterable[T] | None) -> list[T]:
    """Return one or several as a list.

    Example:
        >>> as_list(None), as_list(1), as_list((1, 2))
        ([], [1], [1, 2])
    """
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def to_strings(name: str, given: str | Iterable[str] | None) -> list[str]:
    """Return strings as a list; a single string becomes a list of one, and None an empty list.

    Raises:
        TypeError: ``given`` contains something else.

    Example:
        >>> to_strings("tags", "first"), to_strings("tags", ("a", "b"))
        (['first'], ['a', 'b'])
    """
    strings: list[str] = as_list(given)
    if not all(isinstance(one, str) for one in strings):
        raise TypeError(f"{name} must be a string or a list of strings, got {shortened(given)}.")
    return strings


def to_options(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of options as a dictionary, which is empty for None.

    Raises:
        TypeError: ``given`` is not a mapping with strings as keys.

    Example:
        >>> to_options("init_kwargs", {"mode": "offline"})
        {'mode': 'offline'}
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise TypeError(f"{name} must be None or a dictionary whose keys are strings, got {shortened(given)}.")
    return dict(given)


def to_path(name: str, given: str | os.PathLike[str]) -> str:
    """Return a path or a template of one as a string.

    Raises:
        TypeError: ``given`` is neither a string nor a path.

    Example:
        >>> to_path("folder", "runs/{run_name}")
        'runs/{run_name}'
    """
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"{name} must be a string or a path, got {shortened(given)}.")
    return str(given)


def check_run_name(name: object) -> None:
    """Raise an error for a run name that would lead out of the folders whose names contain it.

    Raises:
        TypeError: It is not a string.
        ValueError: It is empty, an absolute path or a URL, has a part of more than 200 bytes, or contains ``..``, a
            control character or a lone surrogate.

    Example:
        >>> check_run_name("team/first")
    """
    if not isinstance(name, str):
        raise TypeError(f"run_name must be a string, got {shortened(name)}.")
    parts = re.split(r"[/\\]", name)
    is_too_long = any(len(part.encode(errors="replace")) > _LONGEST_FOLDER for part in parts)
    if not name or _UNPRINTABLE.search(name) or ".." in parts or _BEGINS_ELSEWHERE.match(name) or is_too_long:
        raise ValueError(
            "run_name must be a name that folders can have, such as 'first' or 'team/first': not empty, without '..', "
            f"control characters and lone surrogates, no absolute path, no URL, and of at most {_LONGEST_FOLDER} bytes "
            f"between slashes, got {shortened(name)}."
        )


def describe(value: Any) -> str:
    """Return a short description of a value, which is the same in every run.

    Example:
        >>> import torch
        >>> describe(print), describe(torch.nn.GELU()), describe((int, 1))
        ('function builtins.print', 'object of torch.nn.modules.activation.GELU', '(class builtins.int, 1)')
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return shortened(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(describe, value[:4]))}{', ...' if len(value) > 4 else ''})"
    category = "class" if isinstance(value, type) else "function" if hasattr(value, "__qualname__") else "object of"
    named: Any = type(value) if category == "object of" else value
    return (
        f"{category} {named.__module__}.{named.__qualname__}"
        if named.__module__
        else f"{category} {named.__qualname__}"
    )


def error_text(error: BaseException) -> str:
    """Return the sentence of an error; those of attrs' own validators also contain the field and the value.

    Example:
        >>> try:
        ...     attrs.make_class("Mode", {"mode": attrs.field(validator=attrs.validators.in_(["min"]))})("best")
        ... except ValueError as error:
        ...     error_text(error)
        "'mode' must be in ['min'] (got 'best')"
    """
    # attrs passes the sentence first, and then the field, what was expected and the value.
    return str(error.args[0] if len(error.args) > 1 and isinstance(error.args[1], attrs.Attribute) else error)


def shortened(value: object) -> str:
    """Return the ``repr`` of an object, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def printable(text: str) -> str:
    r"""Return a string whose control characters and lone surrogates are escaped, as a terminal would obey them.

    Example:
        >>> print(printable("red: \x1b[31m, next\nline"))
        red: \x1b[31m, next
        line
    """
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)


def calling_function() -> str:
    """Return the function that has called the caller, with its file and line: ``"Watch.batch_end (train.py:31)"``."""
    frame = sys._getframe(2)  # noqa: SLF001  (documented)
    return f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def caller_level() -> int:
    """Return the ``stacklevel`` of a warning that names the line that has called this library."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001  (documented)
    # Functions that attrs generates have no module.
    while frame.f_back is not None and frame.f_globals.get("__name__", "composer").partition(".")[0] == "composer":
        frame, level = frame.f_back, level + 1
    return level


def abridged(text: str) -> str:
    """Cut the middle out of very long lines, such as those with a name read from a damaged file.

    Example:
        >>> len(abridged(f"model.{'a' * 5_000_000} is not saved."))
        645
    """
    lines, half = text.split("\n"), _LONGEST_LINE // 2
    for place, line in enumerate(lines):
        if len(line) > _LONGEST_LINE:
            omitted = len(line) - _LONGEST_LINE
            lines[place] = f"{line[:half]} ... ({omitted:,} characters are left out) ... {line[-half:]}"
    return "\n".join(lines)


def from_first_difference(one: str, other: str, width: int = 80) -> tuple[str, str]:
    """Return two strings, or, of long ones, their parts around the first difference.

    Example:
        >>> from_first_difference("a" * 500 + "1", "a" * 500 + "2", width=8)
        ('...aaaa1...', '...aaaa2...')
    """
    if max(len(one), len(other)) <= 2 * width:
        return one, other
    common = next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(common - width // 2, 0)
    return f"...{one[start : start + width]}...", f"...{other[start : start + width]}..."


def bulleted(title: str, lines: Sequence[str]) -> str:
    """Return a title with a line for each sentence; of very many, the first ones and the number of the others.

    Example:
        >>> print(bulleted("These differ:", ["lr", "betas"]))
        These differ:
        - lr
        - betas
    """
    more = [f"... and {len(lines) - _MOST_LINES:,} more."] if len(lines) > _MOST_LINES else []
    return "\n- ".join([title, *lines[:_MOST_LINES], *more])


def nearest(name: object, names: Iterable[str], end: str = ".", *, similarity: float = 0.6) -> str:
    """Return the end of a sentence: a suggestion of the most similar name, or ``end`` if none is similar enough.

    Example:
        >>> nearest("halflife", ["half_life", "smoothing"])
        "; did you mean 'half_life'?"
        >>> nearest("Adamw", ["Adam", "AdamW"])
        "; did you mean 'AdamW'?"
    """
    text = str(name).casefold()
    # The time of the comparison is quadratic in the length of the names.
    candidates = {one.casefold(): one for one in names if len(one) <= _LONGEST_NAME >= len(text)}
    matches = difflib.get_close_matches(text, candidates, n=1, cutoff=similarity)
    return f"; did you mean {candidates[matches[0]]!r}?" if matches else end


_ELSEWHERE = {
    "alpha_f": ("eta_min", "min_lr"),
    "clipping_threshold": ("max_norm", "clip_val", "gradient_clip_val", "max_grad_norm"),
    "comp": ("mode",),
    "keep_best": ("monitor", "mode", "save_top_k"),
    "drop_rate": ("p", "drop_prob", "stochastic_depth_prob"),
    "monitor": ("metric",),
    "trace_handlers": ("torch_prof_folder", "torch_prof_filename", "torch_prof_overwrite", "torch_prof_use_gzip"),
    "smoothing": ("decay", "ema_decay", "epsilon", "label_smoothing"),
    "t_max": ("num_training_steps", "total_iters", "total_steps"),
    "t_warmup": ("warmup", "warmup_steps", "num_warmup_steps", "warmup_epochs", "warmup_t"),
}
"""Arguments by their names in torch, Transformers, timm, Lightning and Keras."""


class _OfClass:
    """The fields of an attrs class, without being an attribute of its objects."""

    def __init__(self, fields: Any) -> None:
        self._fields = fields

    def __get__(self, one: object, owner: type) -> Any:
        if one is not None:
            raise AttributeError(f"{owner.__name__!r} object has no attribute '__attrs_attrs__'")
        return self._fields


class StoredAsObject:
    """Base of attrs classes whose objects OmegaConf stores as they are; it converts others to a configuration."""

    __slots__ = ()

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        """Hide from OmegaConf that the objects are of an attrs class; the functions of attrs look at the class."""
        cls.__attrs_attrs__ = _OfClass(cls.__attrs_attrs__)  # type: ignore[attr-defined]  # set by attrs


class NamesArguments(StoredAsObject):
    """Base of classes whose constructors raise a TypeError that suggests the right name for an unknown argument.

    Example:
        >>> class Smooth(NamesArguments):
        ...     def __init__(self, smoothing=0.9): ...
        >>> Smooth(decay=0.9)
        Traceback (most recent call last):
        TypeError: Smooth has no argument 'decay': use smoothing. Its arguments are smoothing.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # type checkers compare the arguments with those of __init__

        def __new__(cls, *args: Any, **kwargs: Any) -> Self:
            """Check the names of the arguments."""
            own = _arguments(cls.__init__)
            if own is not None and not kwargs.keys() <= own.keys():
                raise TypeError(f"{cls.__name__} {unknown_arguments(kwargs, own)}")
            if args and not own and own is not None:  # object.__init__ ignores them beside a __new__
                raise TypeError(f"{cls.__name__} takes no arguments, got {len(args)}.")
            if own and args and all(one.kind is one.KEYWORD_ONLY for one in own.values()):
                call = ", ".join(f"{name}=..." for name in list(own)[: len(args)])
                raise TypeError(f"{cls.__name__} takes its arguments by name: write {cls.__name__}({call}).")
            return super().__new__(cls)


def unknown_arguments(given: Iterable[str], own: Iterable[str]) -> str:
    """Return the sentences about the names in ``given`` that are not arguments.

    Example:
        >>> unknown_arguments(["smothing"], ["half_life", "smoothing"])
        "has no argument 'smothing'; did you mean 'smoothing'? Its arguments are half_life, smoothing."
    """
    own = list(own)
    ours = {name: one for one in own for name in _ELSEWHERE.get(one, ())}
    hints = {name: f": use {ours[name]}." if name in ours else nearest(name, own) for name in given if name not in own}
    unknown = " It has no argument ".join(f"{name!r}{hint}" for name, hint in hints.items())
    return f"has no argument {unknown} " + (f"Its arguments are {', '.join(own)}." if own else "It has none.")


@functools.cache
def _arguments(constructor: Any) -> dict[str, inspect.Parameter] | None:
    """Return the arguments that a constructor takes by name; None if it takes any."""
    if constructor is object.__init__:
        return {}
    parameters = list(inspect.signature(constructor).parameters.values())[1:]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return {one.name: one for one in parameters if one.kind is not one.VAR_POSITIONAL}

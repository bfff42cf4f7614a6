"""Errors for unknown arguments of constructors that suggest the right ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

from composer.core.checks import nearest

__all__ = ["NamesArguments", "StoredAsObject", "unknown_arguments"]

_ELSEWHERE = {
    "alpha_f": ("eta_min", "min_lr"),
    "clipping_threshold": ("max_norm", "clip_val", "gradient_clip_val", "max_grad_norm"),
    "comp": ("mode",),
    "drop_rate": ("p", "drop_prob", "stochastic_depth_prob"),
    "monitor": ("metric",),
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

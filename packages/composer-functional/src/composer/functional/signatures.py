"""Signatures in ``help()`` with annotations as they are in the source: ``input: Tensor``, not ``input: 'Tensor'``.

All modules postpone the evaluation of annotations, which are then strings. Signatures print strings with quotes;
``help()`` removes them only from Python 3.14.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ForwardRef


class _Annotation(str):
    """An annotation as a string without quotes; a signature contains its `repr`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def unquote_annotations(package: Mapping[str, Any]) -> None:
    """Remove the quotes from the annotations in signatures of a package's public functions, classes and methods.

    The annotations remain equal strings, so that :func:`typing.get_type_hints` returns the same types.

    Args:
        package: The ``globals()`` of the package. Its ``__all__`` lists the public names.

    Example:
        >>> from inspect import signature
        >>> def crop(input: Tensor, size: int = 8) -> Tensor: ...
        >>> signature(crop)
        <Signature (input: 'Tensor', size: 'int' = 8) -> 'Tensor'>
        >>> unquote_annotations({"__all__": ["crop"], "crop": crop})
        >>> signature(crop)
        <Signature (input: Tensor, size: int = 8) -> Tensor>
    """
    for defined in _annotations([package[name] for name in package["__all__"]]):
        for name, annotation in defined.items():
            # Named tuples have ForwardRef objects instead of strings.
            written = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation
            if isinstance(written, str):
                defined[name] = _Annotation(written)


def _annotations(public: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the annotations of what this library defines: functions, classes, their bases, and methods."""
    classes = [kind for one in public for kind in getattr(one, "__mro__", ())]
    for one in [*public, *classes, *(member for kind in classes for member in vars(kind).values())]:
        one = getattr(one, "__func__", one)  # noqa: PLW2901  (of a class method or static method)
        if str(getattr(one, "__module__", None)).startswith("composer."):
            yield vars(one).get("__annotations__", {}) if isinstance(one, type) else getattr(one, "__annotations__", {})

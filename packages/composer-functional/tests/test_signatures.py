"""Annotations print without quotes in signatures and remain strings."""

from __future__ import annotations

import inspect
import typing
from typing import NamedTuple

import torch

from composer import functional as cf
from composer.functional.signatures import unquote_annotations


def test_signature_of_a_function():
    """The signature prints as in the source."""
    text = str(inspect.signature(cf.draw_beta))

    assert text == "(alpha: float, *, generator: torch.Generator | None = None) -> float"


def test_types_are_resolved():
    """typing.get_type_hints returns the types."""
    hints = typing.get_type_hints(cf.draw_beta)

    assert hints == {"alpha": float, "generator": torch.Generator | None, "return": float}


def test_methods_bases_and_fields():
    """Methods of all kinds, constructors of named tuples and the bases of a class are included."""

    class Base:
        @classmethod
        def make(cls, size: int) -> Base: ...

        @staticmethod
        def scale(value: float) -> float: ...

    class Kind(Base):
        def __init__(self, name: str) -> None: ...

    class Fields(NamedTuple):
        count: int

    for kind in (Base, Kind, Fields):
        kind.__module__ = Fields.__new__.__module__ = "composer.functional.example"
    for function in (Base.make.__func__, Base.scale, Kind.__init__):
        function.__module__ = "composer.functional.example"

    unquote_annotations({"__all__": ["Kind", "Fields"], "Kind": Kind, "Fields": Fields})

    texts = [str(inspect.signature(one)) for one in (Kind, Kind.make, Kind.scale, Fields)]
    assert texts == ["(name: str) -> None", "(size: int) -> Base", "(value: float) -> float", "(count: int)"]


def test_other_libraries_are_unchanged():
    """The annotations of a base class of torch remain as they are."""
    assert type(torch.nn.Module.get_submodule.__annotations__["return"]) is str

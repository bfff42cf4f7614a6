"""Modules whose class is derived from their own at run time, as ``fully_shard`` does."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Self, SupportsIndex

from torch import nn


class DerivedModule(nn.Module):
    """Base of modules that take over the class and all attributes of another module.

    The class of an instance inherits from a subclass of this class and from the other module's class: parameters keep
    their names in a state dict, and ``isinstance`` of the plain class remains true.

    Attributes:
        prefix: What the name of the class begins with, before that of the plain class.
        made_of: The plain class, and the subclasses of this class that were derived from it, in this order.
    """

    prefix: ClassVar[str]
    made_of: ClassVar[tuple[type[nn.Module], ...]]

    @classmethod
    def take_over(cls, module: nn.Module, **attributes: Any) -> Self:
        """Return an instance with all attributes of a module, which must not be used afterwards, and with others."""
        made: Self = _new(*_made_of(type(module)), cls)
        vars(made).update(vars(module), **attributes)
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # Pickle finds classes by name, and this class is created at run time.
        reduced = super().__reduce_ex__(protocol)
        assert isinstance(reduced, tuple)
        return _new, self.made_of, *reduced[2:]


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, without what was derived from it."""
    return _made_of(type(module))[0]


def _made_of(cls: type[nn.Module]) -> tuple[type[nn.Module], ...]:
    return cls.made_of if issubclass(cls, DerivedModule) else (cls,)


def _new(*made_of: type[nn.Module]) -> Any:
    cls = _derive(made_of)
    return cls.__new__(cls)


@functools.cache
def _derive(made_of: tuple[type[nn.Module], ...]) -> type[nn.Module]:
    if len(made_of) == 1:
        return made_of[0]
    cls, kind = _derive(made_of[:-1]), made_of[-1]
    assert issubclass(kind, DerivedModule)
    return type(f"{kind.prefix}{cls.__name__}", (kind, cls), {"made_of": made_of, "__doc__": cls.__doc__})

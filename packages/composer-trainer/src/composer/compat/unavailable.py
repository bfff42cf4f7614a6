"""Names of MosaicML Composer without an equal here: programs import them, and an error is raised where one is used."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from composer.compat.table import entries


@functools.cache
def _stand_in(name: str) -> type:
    """Return a class of which nothing is an instance, and whose use raises an error with what to use instead."""
    entry = next((one for one in entries().values() if (one.module, one.name) == (__name__, name)), None)
    if entry is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def use(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{entry.former} is not available here. {entry.advice} See docs/guides/moving_from_composer.md."
        )

    return type(name, (), {"__new__": use, "__class_getitem__": use, "__module__": __name__})


def __getattr__(name: str) -> type:
    return _stand_in(name)

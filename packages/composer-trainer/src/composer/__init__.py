"""Training that is faster, cheaper and better, by algorithms that compose.

``composer`` is a namespace that four distributions share; this file belongs to composer-trainer. The names below are
looked up when they are first used, so that ``from composer import functional`` stays as light as it is without this
package. Names of MosaicML Composer that are elsewhere here are found by :mod:`composer.compat`.
"""

import sys
from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

__path__ = extend_path(__path__, __name__)

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from composer.core import (
        Algorithm,
        Callback,
        DataSpec,
        Engine,
        Evaluator,
        Event,
        Logger,
        State,
        Time,
        Timestamp,
        TimeUnit,
    )
    from composer.models import ComposerModel
    from composer.trainer import Trainer

__version__ = "0.3.0"

__all__ = [
    "Algorithm",
    "Callback",
    "ComposerModel",
    "DataSpec",
    "Engine",
    "Evaluator",
    "Event",
    "Logger",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trainer",
]

_HOMES = {"ComposerModel": "composer.models", "Trainer": "composer.trainer"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        full_name = f"{__name__}.{name}"
        try:
            if not name.startswith("_"):
                return import_module(full_name)
        except ModuleNotFoundError as error:
            if error.name not in {full_name, name}:
                raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES.get(name, "composer.core")), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _FormerNames:
    """Finds modules and names of MosaicML Composer that are elsewhere here, after all other finders have failed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        del path, target
        if not name.startswith(f"{__name__}.") or name.startswith(f"{__name__}.compat"):
            return None
        from composer.compat.modules import find_spec as find_former  # noqa: PLC0415  (only after a failed import)

        return find_former(name)


sys.meta_path.append(_FormerNames)

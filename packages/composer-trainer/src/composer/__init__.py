"""Training that is faster, cheaper and better, by algorithms that compose.

``composer`` is a namespace that four distributions share; this file belongs to composer-trainer. The names below are
looked up when they are first used, so that ``from composer import functional`` stays as light as it is without this
package.
"""

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

__path__ = extend_path(__path__, __name__)

if TYPE_CHECKING:
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

__version__ = "0.1.0"

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
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES.get(name, "composer.core")), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

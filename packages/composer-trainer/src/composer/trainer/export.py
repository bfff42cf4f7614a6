"""The former module of :mod:`composer.export`; its names stay importable for one release."""

import warnings
from typing import Any

import composer.export.inference


def __getattr__(name: str) -> Any:
    if name not in ("ExportError", "Transform", "export_for_inference"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"composer.trainer.export.{name} has moved to composer.export.", DeprecationWarning, stacklevel=2)
    return getattr(composer.export.inference, name)

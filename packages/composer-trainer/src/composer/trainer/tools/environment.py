"""The warning of a distribution that owns the same files."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings


@functools.cache
def warn_of_mosaicml() -> None:
    """Warn once if the distribution ``mosaicml`` is installed: its files and those of this library replace each other.

    Example:
        >>> warn_of_mosaicml()
    """
    try:
        version = importlib.metadata.version("mosaicml")
    except importlib.metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"The distribution mosaicml {version} is installed beside composer-trainer, and both contain "
        "composer/__init__.py and other files of the same name, of which only the last installed exist. Run: "
        "pip uninstall -y mosaicml && pip install --force-reinstall --no-deps composer-functional composer-engine "
        "composer-models composer-trainer",
        stacklevel=4,
    )

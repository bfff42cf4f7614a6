"""Optional products: checked when a component is created, imported at first use."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def require_product(module: str, extra: str) -> None:
    """Raise an error if a product is not installed, without importing it.

    Args:
        module: The name of its module.
        extra: The extra of composer-trainer that installs it.

    Raises:
        ModuleNotFoundError: It is not installed.

    Example:
        >>> require_product("no_such_product", "wandb")
        Traceback (most recent call last):
        ModuleNotFoundError: no_such_product is not installed. Install it: pip install "composer-trainer[wandb]"
    """
    if importlib.util.find_spec(module) is None:
        raise _missing(module, extra)


def import_product(module: str, extra: str) -> Any:
    """Import and return a module of a product.

    Args:
        module: Its name.
        extra: The extra of composer-trainer that installs it.

    Raises:
        ModuleNotFoundError: It is not installed.

    Example:
        >>> import_product("json", "wandb").dumps([1])
        '[1]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The product is installed, but one of its own dependencies is not.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise _missing(module, extra) from error


def _missing(module: str, extra: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f'{module} is not installed. Install it: pip install "composer-trainer[{extra}]"', name=module
    )

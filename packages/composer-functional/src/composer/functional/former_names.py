"""Former names of a module, which another distribution may serve: the finders of Python are called for them."""

from __future__ import annotations

import sys
from importlib import import_module


def serve_former_names(name: str) -> None:
    """Search with Python's finders for what imported modules lack, as attributes and by ``from ... import``.

    Args:
        name: The full name of a module, which is **changed in place**, as are the modules directly below it.

    Example:
        >>> import composer.functional.checks
        >>> serve_former_names("composer.functional.checks")
        >>> hasattr(composer.functional.checks, "nothing")
        False
    """
    for module in [name, *(one for one in list(sys.modules) if one.rpartition(".")[0] == name)]:
        _serve(module)


def _serve(name: str) -> None:
    own = vars(sys.modules[name])

    def find(attribute: str) -> object:
        if not attribute.startswith("__"):
            try:
                import_module(f"{name}.{attribute}")
            except ModuleNotFoundError as error:
                if error.name not in {f"{name}.{attribute}", attribute}:  # the latter has advice
                    raise
            if attribute in own:  # set by a finder
                return own[attribute]
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}", name=attribute, obj=sys.modules[name])

    # With a path, Python also calls its finders for modules below it, such as `composer.algorithms.mixup.mixup`.
    own.setdefault("__path__", [])
    own["__getattr__"] = find

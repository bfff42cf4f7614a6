"""Former names of a module, which another distribution may serve: the finders of Python are called for them."""

from __future__ import annotations

import sys
from importlib import import_module

__all__: list[str] = []


def serve_former_names(name: str) -> None:
    """Search with Python's finders for what an imported module lacks, as an attribute and by ``from ... import``.

    Args:
        name: The full name of the module; **changed in place**.

    Example:
        >>> import composer.functional.checks
        >>> serve_former_names("composer.functional.checks")
        >>> hasattr(composer.functional.checks, "nothing")
        False
    """
    own = vars(sys.modules[name])

    def find(attribute: str) -> object:
        if not attribute.startswith("__"):
            try:
                import_module(f"{name}.{attribute}")
            except ModuleNotFoundError as error:
                if error.name != f"{name}.{attribute}":
                    raise
            if attribute in own:  # set by a finder
                return own[attribute]
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}", name=attribute, obj=sys.modules[name])

    # With a path, Python also calls its finders for modules below it, such as `composer.algorithms.mixup.mixup`.
    own.setdefault("__path__", [])
    own["__getattr__"] = find

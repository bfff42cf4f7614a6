"""The repeated blocks of a model, such as the layers of a transformer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from torch import nn

from composer.functional.layers.derived import plain_class

_CONTAINERS = {nn.ModuleDict, nn.ModuleList, nn.Sequential}


def repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that the model names in ``_no_split_modules``, or else its repeated blocks, with their names.

    Models of Transformers name their blocks. Repeated blocks are the outermost modules with children whose class occurs
    several times in lists and sequences of the model.

    Example:
        >>> model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2) for _ in range(2)), nn.Linear(8, 2))
        >>> [name for name, _ in repeated_blocks(model)]
        ['0', '1']
    """
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    members = Counter(
        plain_class(member)
        for holder in model.modules()
        if isinstance(holder, (nn.ModuleList, nn.Sequential))
        for member in holder.children()
        if type(member) not in _CONTAINERS and any(True for _ in member.children())
    )
    classes = tuple(named) or tuple(cls for cls, count in members.items() if count > 1)
    yield from chosen_modules(model, is_one_of(classes), outermost=not named)


def is_one_of(classes: tuple[str | type[nn.Module], ...]) -> Callable[[nn.Module], bool]:
    """Return a function that returns whether a module is of one of some classes, or of one of these names.

    The class of a module that surgery has changed is its plain class, too.
    """

    def is_one(module: nn.Module) -> bool:
        kinds = {type(module), plain_class(module)}
        return any(kind is each or kind.__name__ == each for kind in kinds for each in classes)

    return is_one


def chosen_modules(
    model: nn.Module, choose: Callable[[nn.Module], bool], *, outermost: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the chosen modules with weights, each once, outer before inner, or only the outermost."""
    last: str | None = None
    for name, module in model.named_modules():
        if module is model or not choose(module) or not any(True for _ in module.parameters()):
            continue
        if outermost and last is not None and name.startswith(f"{last}."):
            continue
        last = name
        yield name, module

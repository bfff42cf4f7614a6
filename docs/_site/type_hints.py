"""Makes all type hints of the packages resolvable, so that the reference links them."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pkgutil import walk_packages
from typing import TYPE_CHECKING

import composer

if TYPE_CHECKING:
    from types import CodeType, ModuleType

PUBLIC_HOMES = [
    "torch",
    "torch.nn",
    "torch.optim",
    "torch.optim.lr_scheduler",
    "torch.profiler",
    "torch.utils.data",
    "torchmetrics",
]
IMMUTABLE = 1 << 8
"""The flag of types that are written in C, whose attributes cannot be set."""


def complete() -> None:
    """Run the blocks under ``if TYPE_CHECKING`` of all modules of ``composer``.

    They cannot run while the modules are imported, because type hints are circular where the concepts are.
    """
    names = [module.name for module in walk_packages(composer.__path__, "composer.")]
    pending = [block for name in ["composer", *names] if not name.endswith("__main__") for block in _blocks(name)]
    while pending:
        module, code = pending.pop(0)
        try:
            exec(code, vars(module))
        except ImportError:  # the imported name is defined by a block that has not run yet
            pending.append((module, code))


def _blocks(name: str) -> list[tuple[ModuleType, CodeType]]:
    module = import_module(name)
    nodes = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.If)]
    nodes = [node for node in nodes if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"]
    return [(module, compile(ast.Module(node.body, []), name, "exec")) for node in nodes]


def use_public_names() -> None:
    """Let torch's classes state the module they are documented in: ``torch.nn``, not ``torch.nn.modules.module``."""
    for name in PUBLIC_HOMES:
        for attribute, value in vars(import_module(name)).items():
            if not inspect.isclass(value) or value.__name__ != attribute or value.__flags__ & IMMUTABLE:
                continue
            if value.__module__.startswith(f"{name}."):
                value.__module__ = name

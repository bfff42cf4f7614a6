"""Imports among the modules of composer.core."""

import ast
import graphlib
from pathlib import Path

import pytest

import composer.core

CIRCLE = {
    "algorithm",
    "callback",
    "conflicts",
    "evaluator",
    "fields",
    "interval",
    "logger",
    "passes",
    "plan",
    "plan_mermaid",
    "plan_svg",
    "plan_text",
    "saved_state",
    "state",
}
"""Modules that refer to each other in type hints; ARCHITECTURE.md gives the reasons."""


def imports(*, hints):
    """Return the modules that each module of composer.core imports, with or without those for type hints."""
    files = {path.stem: path for path in Path(composer.core.__file__).parent.glob("*.py") if path.stem != "__init__"}
    graph = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text())
        blocks = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ]
        skipped = set() if hints else {id(node) for block in blocks for node in ast.walk(block)}
        result = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in skipped]
        modules = {
            f"{node.module}.{alias.name}".split(".")[2]
            for node in result
            for alias in node.names
            if node.module.startswith("composer.core")
        }
        graph[name] = modules & files.keys()
    return graph


def test_no_circular_imports_at_run_time():
    """Each module of composer.core can be imported first."""
    order = tuple(graphlib.TopologicalSorter(imports(hints=False)).static_order())

    assert "state" in order


def test_circular_type_hints():
    """Apart from the listed modules, type hints introduce no circular imports."""
    graph = {name: modules - CIRCLE for name, modules in imports(hints=True).items() if name not in CIRCLE}

    assert tuple(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("name", sorted(CIRCLE))
def test_listed_modules_are_circular(name):
    """A module that is no longer circular has to be removed from the list."""
    graph, reached, pending = imports(hints=True), set(), [name]
    while pending:
        new = graph[pending.pop()] - reached
        reached |= new
        pending += new

    assert name in reached

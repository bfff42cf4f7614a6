"""Imports among the modules of composer.core."""

import ast
import graphlib
from pathlib import Path

import composer.core


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


def reached_from(name, graph):
    """Return all modules that a module imports, directly or not."""
    reached, pending = set(), [name]
    while pending:
        new = graph[pending.pop()] - reached
        reached |= new
        pending += new
    return reached


def test_no_circular_imports_at_run_time():
    """Each module of composer.core can be imported first."""
    order = tuple(graphlib.TopologicalSorter(imports(hints=False)).static_order())

    assert "state" in order


def test_circles_of_type_hints_have_three_modules():
    """With type hints, only a state, its algorithms and callbacks, and their logger refer to each other."""
    graph = imports(hints=True)
    reached = {name: reached_from(name, graph) for name in graph}
    circles = {frozenset(one for one in reached[name] if name in reached[one]) for name in graph}

    assert max(map(len, circles)) <= 3

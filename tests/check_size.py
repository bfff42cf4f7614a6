"""Compare the size of the packages with the limits in ``pyproject.toml``.

A line of code has a token of Python and is neither a docstring nor a comment. Run it with ``--list`` to see the
sizes of all files.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
CENTRAL = ("core", "trainer", "checkpoint", "distributed")
"""The rooms that a reader of a step, a save or a load walks through; without ``core/testing``."""
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> list[Path]:
    """Return the modules of the packages."""
    return sorted(ROOT.glob("packages/*/src/**/*.py"))


def is_central(path: Path) -> bool:
    """Return whether a module is in one of the central rooms."""
    parts = module_name(path).split(".")
    return len(parts) > 1 and parts[1] in CENTRAL and parts[1:3] != ["core", "testing"]


def tests() -> list[Path]:
    """Return the modules of the tests, with their fixtures and programs."""
    return sorted([*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / "conftest.py"])


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that contain code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for one in tokens if one.type not in NO_CODE for line in range(one.start[0], one.end[0] + 1)}
    return lines - docstring_lines(ast.parse(source))


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines of docstrings, and of strings below attributes."""
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return {line for text in texts for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)}


def bodies(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each function's name and the number of lines of its body, without the docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1:] if ast.get_docstring(node) else node.body
            yield node.name, (node.end_lineno or 0) - first[0].lineno + 1 if first else 0


def longest_body(source: str) -> tuple[str, int]:
    """Return the name and the number of lines of the longest function of a module."""
    return max(bodies(ast.parse(source)), key=lambda one: one[1], default=("", 0))


def imported(path: Path, tree: ast.Module, modules: dict[str, Path]) -> set[str]:
    """Return the modules of the packages that a module imports, also for type hints and inside functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & modules.keys()


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or not (strongly connected components)."""
    reached = {name: _reachable(name, imports) for name in imports}
    groups = {frozenset(one for one in reached[name] if name in reached[one]) for name in imports}
    return sorted((sorted(group) for group in groups if len(group) > 1), key=len, reverse=True)


def _reachable(name: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = imports[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def module_name(path: Path) -> str:
    """Return the name by which a source file is imported."""
    parts = path.relative_to(next(one for one in path.parents if one.name == "src")).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_circles() -> list[list[str]]:
    """Return the circles of imports of the packages, without lists of public names."""
    modules = {module_name(path): path for path in sources() if path.name != "__init__.py"}
    trees = {name: ast.parse(path.read_text()) for name, path in modules.items()}
    return circles({name: imported(modules[name], tree, modules) for name, tree in trees.items()})


def main() -> int:
    """Print the sizes, and return 1 if one is above its limit."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["composer-size"]
    texts = {path: path.read_text() for path in sources()}
    lines = {path: len(code_lines(text)) for path, text in texts.items()}
    if "--list" in sys.argv:
        for path, count in sorted(lines.items(), key=lambda item: item[1]):
            print(count, path.relative_to(ROOT))
    found = {path: longest_body(text) for path, text in texts.items()}
    longest = max(found, key=lambda path: found[path][1])
    largest = max(texts, key=lambda path: texts[path].count("\n"))
    circle = max(import_circles(), key=len, default=[])
    sizes = {
        "code-lines": (sum(lines.values()), "all packages"),
        "central-lines": (sum(lines[path] for path in lines if is_central(path)), ", ".join(CENTRAL)),
        "test-lines": (sum(len(code_lines(path.read_text())) for path in tests()), "all tests"),
        "body-lines": (found[longest][1], f"{longest.relative_to(ROOT)}: {found[longest][0]}"),
        "file-lines": (texts[largest].count("\n"), str(largest.relative_to(ROOT))),
        "circle-modules": (len(circle), ", ".join(circle)),
    }
    for name, (size, where) in sizes.items():
        print(f"{name}: {size} of {limits[name]} ({where})")
    return int(any(size > limits[name] for name, (size, _) in sizes.items()))


if __name__ == "__main__":
    sys.exit(main())

"""Public names are documented, and their examples have the stated output."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

MODULES = [
    "composer.ablation",
    "composer.cli",
    "composer.compat",
    "composer.diagnostics",
    "composer.distributed",
    "composer.export",
    "composer.foreign",
    "composer.loggers",
    "composer.callbacks",
    "composer.checkpoint",
    "composer.optim",
    "composer.profiler",
    "composer.trainer",
    "composer.trainer.reproducibility",
]
SYMBOLS = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]
OWN = [
    (module, name)
    for module, name in SYMBOLS
    if inspect.getmodule(getattr(importlib.import_module(module), name)).__name__.startswith(module)
]


@pytest.mark.parametrize(("module", "name"), SYMBOLS)
def test_symbols_are_documented(module, name):
    """Each public symbol, and each public method of a public class, has a docstring."""
    symbol = getattr(importlib.import_module(module), name)
    methods = [value for key, value in vars(symbol).items() if inspect.isfunction(value) and not key.startswith("_")]

    assert all(inspect.getdoc(documented) for documented in [symbol, *methods])


@pytest.mark.parametrize(("module", "name"), OWN)
def test_examples_run(module, name):
    """The docstring of each class and function has an example with the stated output."""
    symbol = getattr(importlib.import_module(module), name)
    namespace = vars(inspect.getmodule(symbol)).copy()

    examples = doctest.DocTestFinder(recurse=False).find(symbol, name, globs=namespace)
    results = [doctest.DocTestRunner().run(example) for example in examples]

    assert [result.failed for result in results] == [0]
    assert results[0].attempted > 0


def helpers():
    """Return all modules of the packages, public or not."""
    roots = [importlib.import_module(name) for name in MODULES if name.count(".") == 1]
    result = [info.name for root in roots for info in pkgutil.iter_modules(root.__path__, f"{root.__name__}.")]
    return [name for name in result if not name.endswith("__main__")]


@pytest.mark.parametrize("name", helpers())
def test_examples_of_private_modules_run(name):
    """Examples in private modules have the stated output too."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0

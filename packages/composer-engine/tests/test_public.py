"""Public names are documented with examples that run, and the import is light."""

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import composer.algorithms
import composer.core

MODULES = [
    "composer.algorithms",
    *(f"composer.algorithms.{module.name}" for module in pkgutil.iter_modules(composer.algorithms.__path__)),
    "composer.core",
    *(module.name for module in pkgutil.walk_packages(composer.core.__path__, "composer.core.")),
]
SYMBOLS = [
    (module, name)
    for module in MODULES
    for name, value in vars(importlib.import_module(module)).items()
    if not name.startswith("_") and getattr(value, "__module__", None) == module
]


@pytest.mark.parametrize("module", MODULES)
def test_public_names_exist(module):
    """Each public name exists, and is listed once: packages list them, and the modules that users import."""
    imported = importlib.import_module(module)
    names = getattr(imported, "__all__", [])

    assert len(set(names)) == len(names)
    assert all(hasattr(importlib.import_module(module), name) for name in names)


@pytest.mark.parametrize(("module", "name"), SYMBOLS)
def test_symbols_are_documented(module, name):
    """Each class and function that others may import, and each such method and property, has its own docstring."""
    symbol = getattr(importlib.import_module(module), name)
    if not (inspect.isclass(symbol) or inspect.isfunction(symbol)):
        return
    members = [value for key, value in vars(symbol).items() if not key.startswith("_")]
    documented = [one for one in members if inspect.isroutine(one) or isinstance(one, property | classmethod)]

    assert all(one.__doc__ for one in [symbol, *documented])


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module):
    """The examples of all docstrings have the stated output."""
    actual = importlib.import_module(module)

    result = doctest.testmod(actual, optionflags=doctest.ELLIPSIS)

    assert result.failed == 0


def test_public_classes_have_examples():
    """Public classes for direct use have an example."""
    output = [name for name in composer.core.__all__ if ">>>" in (inspect.getdoc(getattr(composer.core, name)) or "")]

    assert {"Algorithm", "Callback", "Engine", "Event", "State", "Stage", "Time", "TimeUnit", "Timestamp"} <= set(
        output
    )


def test_import_is_light():
    """Importing composer.core loads no image, metric or progress bar library beyond torch's."""
    # The name `composer` belongs to composer-trainer where that is installed, whose imports are not in question here.
    program = """
import os, sys
import torch
sys.path[:] = [path for path in sys.path if not os.path.exists(os.path.join(path, "composer", "__init__.py"))]
before = set(sys.modules)
import composer.core
print(sorted({"kornia", "torchvision", "torchmetrics", "tqdm"} & (set(sys.modules) - before)))
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"

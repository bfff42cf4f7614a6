"""Public names are documented with examples that run, and the import is light."""

import doctest
import importlib
import inspect
import subprocess
import sys

import pytest

MODULES = ["composer.models", "composer.metrics", "composer.loss", "composer.loss.utils"]
SYMBOLS = [
    (module, name)
    for module in MODULES
    for name in importlib.import_module(module).__all__
    if callable(getattr(importlib.import_module(module), name))
]


def _defined_here(module, name):
    return inspect.getmodule(getattr(importlib.import_module(module), name)).__name__.startswith(module)


@pytest.mark.parametrize(("module", "name"), SYMBOLS)
def test_symbols_are_documented(module, name):
    """Each public symbol, and each public method of a public class, has a docstring."""
    symbol = getattr(importlib.import_module(module), name)
    methods = [value for key, value in vars(symbol).items() if inspect.isfunction(value) and not key.startswith("_")]

    assert all(inspect.getdoc(documented) for documented in [symbol, *methods])


@pytest.mark.parametrize(("module", "name"), [symbol for symbol in SYMBOLS if _defined_here(*symbol)])
def test_examples_run(module, name):
    """Each class docstring has an example with the stated output."""
    symbol = getattr(importlib.import_module(module), name)
    namespace = vars(inspect.getmodule(symbol)).copy()

    examples = doctest.DocTestFinder(recurse=False).find(symbol, name, globs=namespace)
    results = [doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example) for example in examples]

    assert [result.failed for result in results] == [0]
    assert results[0].attempted > 0


@pytest.mark.parametrize("module", ["composer.models", "composer.loss"])
def test_import_is_lazy(module):
    """Libraries for models and metrics are imported when they are used."""
    heavy = {"transformers", "peft", "tokenizers", "safetensors", "torchmetrics", "torchvision"}
    program = f"import sys, {module}; print({heavy} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"

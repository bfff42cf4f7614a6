"""Public names are listed, documented with examples that run, and import quickly."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from composer import functional as cf

MODULES = [module.name for module in pkgutil.walk_packages(cf.__path__, "composer.functional.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str):
    """Every docstring example has the stated output."""
    results = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch, "nn": nn})

    assert results.failed == 0


@pytest.mark.parametrize("name", sorted(set(cf.__all__) - {"ReplacementFunction"}))
def test_public_names_are_documented(name: str):
    """Every public name has its own docstring with an example."""
    doc = inspect.getdoc(getattr(cf, name)) or ""

    assert ">>>" in doc


def test_public_list_is_sorted_and_complete():
    """The package's list has the functions and classes that the package imports, and only these."""
    imported = {name for name, one in vars(cf).items() if getattr(one, "__module__", "").startswith(f"{cf.__name__}.")}

    assert list(cf.__all__) == sorted(cf.__all__)
    assert imported - {"unquote_annotations"} == set(cf.__all__) - {"ReplacementFunction"}  # a type


def test_import_is_light():
    """Importing loads torch and no other slow module, and does not change torch's state."""
    code = (
        "import torch, sys; before = torch.get_rng_state(); loaded = set(sys.modules);"
        "import composer.functional;"
        "assert torch.equal(before, torch.get_rng_state());"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - loaded}))"
    )

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert set(run.stdout.split()) <= {"composer", "__future__"}


def test_composer_is_a_namespace_package():
    """Only composer-trainer contains composer/__init__.py."""
    files = importlib.import_module("composer.functional").__spec__.submodule_search_locations

    assert all(not Path(place).parent.joinpath("__init__.py").exists() for place in files)

"""Former import paths give the same objects as the new ones, with a warning that contains the new import."""

import importlib
import importlib.util
import pickle
import re
import subprocess
import sys
import warnings

import pytest

from composer.compat import entries
from composer.compat.table import former_modules

MOVED = [entry for entry in entries().values() if entry.module is not None and entry.name is not None]
RENAMED_MODULES = [entry for entry in entries().values() if entry.module is not None and entry.name is None]
GONE = [entry for entry in entries().values() if entry.module is None]


@pytest.fixture(autouse=True)
def _fresh():
    """Forget former names that were imported before, so that each test sees their warnings."""
    forget()
    yield
    forget()


def forget():
    for name in [name for name in sys.modules if name in former_modules() and is_former(sys.modules[name])]:
        module = sys.modules.pop(name)
        parent, _, last = name.rpartition(".")
        if vars(sys.modules.get(parent, module)).get(last) is module:
            delattr(sys.modules[parent], last)
    for entry in MOVED:
        parent, _, last = entry.former.rpartition(".")
        if parent in sys.modules and last not in getattr(sys.modules[parent], "__all__", [last]):
            vars(sys.modules[parent]).pop(last, None)


def is_former(module):
    return type(module).__name__ == "_FormerModule"


def run(statement):
    """Run a statement and return its variables and the messages of its warnings."""
    variables = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(statement, variables)
    return variables, [str(warning.message) for warning in caught if warning.category is DeprecationWarning]


def warning_of(entry):
    where = "" if entry.advice else f" of {entry.module}" + (f".{entry.name}" if entry.name else "")
    return f"{entry.former} is a former name{where}. Replace it: {entry.change}"


def home(entry):
    return getattr(importlib.import_module(entry.module), entry.name)


@pytest.mark.parametrize("entry", MOVED, ids=lambda entry: entry.former)
def test_moved_names(entry):
    """A former name is the same object as the new one, with one warning that contains the new import.

    A name of a renamed module that is elsewhere has a warning beside that of the module.
    """
    parent, _, name = entry.former.rpartition(".")
    renamed = [entries()[parent]] if parent in entries() else []

    variables, messages = run(f"from {parent} import {name}")

    assert variables[name] is home(entry)
    assert messages == [
        *map(warning_of, renamed),
        *([] if any(one.module == entry.module for one in renamed) else [warning_of(entry)]),
    ]


@pytest.mark.parametrize("entry", [one for one in MOVED if one.advice is None], ids=lambda entry: entry.former)
def test_the_advised_import_works(entry):
    """The import in the warning gives the object under its former name, without a warning."""
    name = entry.former.rpartition(".")[2]

    variables, messages = run(entry.change)

    assert variables[name] is home(entry)
    assert messages == []


@pytest.mark.parametrize("entry", RENAMED_MODULES, ids=lambda entry: entry.former)
@pytest.mark.parametrize("form", ["from {parent} import {name}", "import {parent}.{name} as {name}"])
def test_renamed_modules(entry, form):
    """A former module gives the names of the new one, with one warning for all of them."""
    parent, _, name = entry.former.rpartition(".")
    names = [one.name for one in MOVED if one.former.startswith(f"{entry.former}.") and one.module == entry.module]

    variables, messages = run("\n".join([form.format(parent=parent, name=name), *(f"{name}.{one}" for one in names)]))
    advised, none = run(entry.change)

    assert all(getattr(variables[name], one) is getattr(advised[name], one) for one in names)
    assert messages == [warning_of(entry)]
    assert none == []


@pytest.mark.parametrize("entry", GONE, ids=lambda entry: entry.former)
def test_names_without_an_equal(entry):
    """A name that is not available raises an ImportError with what to use instead."""
    parent, _, name = entry.former.rpartition(".")

    with pytest.raises(ImportError, match=re.escape(f"not available here. {entry.advice} See docs/guides")):
        run(f"from {parent} import {name}")


@pytest.mark.parametrize(
    ("package", "name", "advice"),
    [
        ("composer", "ablate", ": write from composer.ablation import ablate."),
        ("composer", "lr_find", ": write from composer.diagnostics import find_lr."),
        ("composer.callbacks", "KeepBest", ": write from composer.checkpoint import KeepBest."),
        ("composer.callbacks", "EarlyStopping", ": use composer.callbacks.EarlyStopper."),
        ("composer.core", "Trainer", ": write from composer import Trainer."),
        ("composer.loggers", "TensorBoardLogger", ": write from composer.loggers import TensorboardLogger."),
        ("composer.metrics", "IoU", "; did you mean 'MIoU'?"),
        ("composer.optim", "parameter_groups", ": write from composer.functional import parameter_groups."),
    ],
)
def test_names_of_other_packages(package, name, advice):
    """An import from the wrong package raises an ImportError with the right one, and there is no such attribute."""
    with pytest.raises(ImportError, match=f"^{re.escape(f'cannot import name {name!r} from {package!r}{advice}')}$"):
        run(f"from {package} import {name}")
    assert not hasattr(importlib.import_module(package), name)


def test_repeated_questions_search_once(monkeypatch):
    """A program that asks for an attribute again and again compares the name with all others once."""
    calls = []
    monkeypatch.setattr("composer.core.checks.nearest", lambda *names: calls.append(names) or "")

    for _ in range(3):
        assert not hasattr(importlib.import_module("composer"), "nothing_like_it")
    assert len(calls) == 1


def test_names_of_no_package():
    """The error of a name that resembles none is that of Python, and modules that are missing are no names."""
    for statement in ("from composer.optim import nothing", "import composer.callbacks.nothing"):
        with pytest.raises(ImportError, match=r"cannot import name 'nothing' from 'composer.optim' \(|No module named"):
            run(statement)


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("composer.core.state", "Event", "composer.core"),
        ("composer.trainer.trainer", "Time", "composer.core"),
        ("composer.callbacks.speed_monitor", "ensure_tuple", "composer.compat.replacements"),
        ("composer.callbacks.checkpoint_saver", "Logger", "composer.loggers"),
        ("composer.models.base", "Device", "composer.core.former"),
        ("composer.loss.loss", "infer_target_type", "composer.functional"),
    ],
)
def test_names_that_a_former_module_imported(module, name, home):
    """Programs import names from modules that use them."""
    variables, _ = run(f"from {module} import {name}")

    assert variables[name] is getattr(importlib.import_module(home), name)


def test_the_warning_is_at_the_line_that_imports():
    """Python shows the warning in the main program by default: it belongs to the importing line."""
    source = "import composer\n\nfrom composer.utils import dist, get_device\n"

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(source, "train.py", "exec"), {"__name__": "__main__"})

    assert [(warning.filename, warning.lineno) for warning in caught] == [("train.py", 3)] * 2


def test_a_name_warns_once():
    """A further import of a former name gives no further warning."""
    _, messages = run(
        "for _ in range(3):\n    from composer.utils import ensure_tuple\n    from composer.core import JSON"
    )

    assert len(messages) == 2


def test_pickles_have_the_new_names():
    """An object that was imported under a former name is pickled under its new one."""
    variables, _ = run("from composer.utils import ensure_tuple\nfrom composer.algorithms.mixup.mixup import MixUp")

    text = pickle.dumps([variables["ensure_tuple"], variables["MixUp"]])

    assert b"composer.compat.replacements" in text
    assert b"composer.algorithms.mixup.mixup" not in text


def test_former_names_in_pickles():
    """A pickle that contains a former name is read."""
    text = b"ccomposer.utils.dist\nget_world_size\n."

    with pytest.warns(DeprecationWarning, match="former name"):
        result = pickle.loads(text)

    assert result is importlib.import_module("composer.distributed").get_world_size


def test_usual_imports_do_not_load_the_table():
    """In a new process, imports of existing names do not load composer.compat."""
    program = (
        "import sys, composer, composer.algorithms.mixup\nfrom composer.core import Time\n"
        "assert sys.meta_path[-1].__module__ == 'composer'\n"
        "sys.exit(any(name.startswith('composer.compat') for name in sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", program], check=False)

    assert done.returncode == 0

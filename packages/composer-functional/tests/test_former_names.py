"""What a module lacks is searched for by Python's finders."""

import sys
import types

import pytest

from composer.functional.former_names import serve_former_names


@pytest.fixture
def module(monkeypatch):
    """Return a module that serves former names, one of which a finder sets."""
    made = types.ModuleType("serving")
    monkeypatch.setitem(sys.modules, "serving", made)

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "serving.former":
                made.former = 3
            if name == "serving.gone":
                raise ImportError("Use another.", name=name)
            if name == "serving.elsewhere":
                raise ModuleNotFoundError("It is elsewhere.", name="elsewhere")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    serve_former_names("serving")
    return made


def test_a_name_of_a_finder(module):
    """The name is an attribute, and can be imported."""
    assert module.former == 3
    del module.former
    from serving import former

    assert former == 3


def test_other_names(module):
    """A name that no finder has is an AttributeError and an ImportError, as of any module."""
    assert not hasattr(module, "nothing")
    assert not hasattr(module, "__file__")
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'serving'"):
        from serving import nothing  # noqa: F401


def test_the_error_of_a_finder(module):
    """An error with advice is not replaced."""
    with pytest.raises(ImportError, match="Use another"):
        _ = module.gone


def test_the_advice_of_a_finder(module):
    """A name that a finder has advice for is no attribute, and importing it raises the advice."""
    assert not hasattr(module, "elsewhere")
    with pytest.raises(ImportError, match="It is elsewhere"):
        from serving import elsewhere  # noqa: F401


def test_the_modules_of_a_package(module, monkeypatch):
    """The loaded modules of a package are served with it, and keep a path of their own."""
    inner, deeper = types.ModuleType("serving.inner"), types.ModuleType("serving.inner.deeper")
    inner.__path__ = ["folder"]
    monkeypatch.setitem(sys.modules, "serving.inner", inner)
    monkeypatch.setitem(sys.modules, "serving.inner.deeper", deeper)

    serve_former_names("serving")

    assert inner.__path__ == ["folder"]
    assert hasattr(inner, "__getattr__")
    assert not hasattr(deeper, "__getattr__")

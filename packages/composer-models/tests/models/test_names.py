"""Errors for unknown names and missing packages."""

import pytest

from composer.models.names import import_extra, suggest


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("ResNet81", " Did you mean 'resnet18' or 'resnet101'?"), ("vit_b16", " Did you mean 'vit_b_16'?"), ("bert", "")],
)
def test_suggest(name, sentence):
    """The most similar names, in any case; nothing if there are none."""
    assert suggest(name, ["resnet18", "resnet101", "vit_b_16"]) == sentence


def test_missing_package_raises():
    """The error has the extra that installs it."""
    with pytest.raises(ModuleNotFoundError, match=r'^It needs x: pip install "composer-models\[extra\]"\.$'):
        import_extra("not_a_package", needed="It needs x", extra="extra")


def test_error_within_a_package_is_raised(tmp_path, monkeypatch):
    """A package that misses another one is not reported as missing."""
    (tmp_path / "half_a_package.py").write_text("import what_it_lacks")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ModuleNotFoundError, match="No module named 'what_it_lacks'"):
        import_extra("half_a_package", needed="It needs x", extra="extra")

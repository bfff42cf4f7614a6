"""What is left out of a saved state, by patterns or a function."""

import pytest

from composer.checkpoint.ignoring import check_ignore_keys, ignored_keys


def make_state():
    """Return a saved state with each kind of part: named tensors, records with a key, and a single value."""
    return {
        "model": {"body.weight": 1, "head.weight": 2, "head.bias": 3},
        "algorithms": [{"key": "EMA", "state": {}}, {"key": "SWA", "state": {}}],
        "timestamp": {"batch": 5, "epoch": 1},
    }


@pytest.mark.parametrize(
    ("patterns", "removed"),
    [
        (None, ()),
        ("model/head.*", ("model/head.weight", "model/head.bias")),
        (["model/body*", "algorithms/EMA"], ("model/body.weight", "algorithms/EMA")),
        ("state/timestamp", ("timestamp",)),
        ("timestamp/batch", ()),
        ("MODEL/*", ()),
    ],
)
def test_patterns(patterns, removed):
    """Patterns select parts by their paths, with the prefix of MosaicML Composer or without; the clock is one part."""
    assert ignored_keys(make_state(), patterns) == removed


def test_rest_is_unchanged():
    """What no pattern selects stays."""
    state = make_state()

    ignored_keys(state, ["model/head.*", "algorithms/SWA"])

    assert state == {
        "model": {"body.weight": 1},
        "algorithms": [{"key": "EMA", "state": {}}],
        "timestamp": {"batch": 5, "epoch": 1},
    }


def test_function_that_removes_a_part():
    """The path of a complete part is returned, not the paths within it."""
    assert ignored_keys(make_state(), lambda state: state.pop("model")) == ("model",)


@pytest.mark.parametrize("keys", [3, [3], {"model": 1, 2: 3}])
def test_other_types_raise(keys):
    """The error has the name of the argument."""
    with pytest.raises(TypeError, match="load_ignore_keys must be strings such as"):
        check_ignore_keys(keys, "load_ignore_keys")

"""What a checkpoint contains of a run, and what is left out of it; complete saves are in ``test_saving.py``."""

import pytest

from composer.checkpoint.contents import contents_of, remove_ignored


def test_weights_only(runs):
    """A checkpoint of weights has neither the optimizers nor what the caller saves."""
    data, tensors = contents_of(runs.make(), {"more": 1}, None, weights_only=True)

    assert not {"optimizers", "extra"} & data.keys()
    assert list(tensors) == ["model.safetensors"]


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
    assert remove_ignored(make_state(), patterns) == removed

"""What a checkpoint contains of a run, and what is left out of it; complete saves are in ``test_saving.py``."""

import pytest
from torch import nn

from composer.checkpoint.contents import SavedPlace, changed_modules, check_ignore_keys, contents_of, remove_ignored
from composer.core.saving.codec import plain, read


def test_weights_only(runs):
    """A checkpoint of weights has neither the optimizers nor what the caller saves."""
    data, tensors = contents_of(runs.make(), {"more": 1}, None, weights_only=True)

    assert not {"optimizers", "extra"} & data.keys()
    assert list(tensors) == ["model.safetensors"]


def test_changed_modules():
    """Modules of another class are named, those of the same class are not."""
    model = nn.Sequential(nn.ReLU(), nn.Linear(1, 1))

    assert changed_modules(model, {"": "Sequential", "0": "Tanh", "1": "Linear"}) == [
        "module '0' was Tanh, and is ReLU."
    ]


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


def test_rest_is_unchanged():
    """What no pattern selects stays."""
    state = make_state()

    remove_ignored(state, ["model/head.*", "algorithms/SWA"])

    assert state == {
        "model": {"body.weight": 1},
        "algorithms": [{"key": "EMA", "state": {}}],
        "timestamp": {"batch": 5, "epoch": 1},
    }


def test_function_that_removes_a_part():
    """The path of a complete part is returned, not the paths within it."""
    assert remove_ignored(make_state(), lambda state: state.pop("model")) == ("model",)


@pytest.mark.parametrize("keys", [3, [3], {"model": 1, 2: 3}])
def test_other_types_raise(keys):
    """The error has the name of the argument."""
    with pytest.raises(TypeError, match="load_ignore_keys must be strings such as"):
        check_ignore_keys(keys, "load_ignore_keys")


PLACE = {
    "epoch": 1,
    "place": 24,
    "global_batch_size": 6,
    "sizes": {"batches": 5, "samples": 30},
    "order": "5f" * 8,
    "loader": {"place": [3]},
    "objects": {"states": {"sampler": {"times": 2}}, "generators": {}},
    "has_ended": False,
    "is_over": False,
    "as_sampler": False,
}


def test_saved_form():
    """A place that a checkpoint contains is read, and saved again in the same form."""
    assert plain(read(PLACE, SavedPlace)) == PLACE


@pytest.mark.parametrize(
    ("name", "value"), [("epoch", -1), ("place", -1), ("global_batch_size", 0), ("order", "2x"), ("order", "")]
)
def test_values_out_of_range(name, value):
    """A value that no place has raises an error with its name."""
    with pytest.raises(ValueError, match=name):
        read({**PLACE, name: value}, SavedPlace)

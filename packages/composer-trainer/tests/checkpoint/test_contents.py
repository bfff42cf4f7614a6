"""What a checkpoint contains of a run; complete saves are in ``test_saving.py``."""

from torch import nn

from composer.checkpoint.contents import changed_modules, contents_of


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

"""The saved form of a place in the training data."""

import pytest

from composer.checkpoint.saved_place import SavedPlace
from composer.core.serialization import from_data, to_data

DATA = {
    "epoch": 1,
    "place": 24,
    "global_batch_size": 6,
    "sizes": {"batches": 5, "samples": 30},
    "order": "5f",
    "loader": {"place": [3]},
    "objects": {"states": {"sampler": {"times": 2}}, "generators": {}},
    "has_ended": False,
    "is_over": False,
    "as_sampler": False,
}


def test_saved_form():
    """A place that a checkpoint contains is read, and saved again in the same form."""
    assert to_data(from_data(DATA, SavedPlace), SavedPlace) == DATA


@pytest.mark.parametrize(("name", "value"), [("epoch", -1), ("place", -1), ("global_batch_size", 0)])
def test_numbers_out_of_range(name, value):
    """A number that no place has raises an error with its name."""
    with pytest.raises(ValueError, match=name):
        from_data({**DATA, name: value}, SavedPlace)

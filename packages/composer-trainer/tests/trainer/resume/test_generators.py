"""Invalid generator states raise before a generator is changed."""

import copy

import numpy as np
import pytest

from composer.trainer.resume.generators import generator_state, set_generator_state


@pytest.mark.parametrize("place", [-1, 625, 10**6])
@pytest.mark.parametrize(
    "make", [lambda: np.random.RandomState(3), lambda: np.random.Generator(np.random.MT19937(3))], ids=["old", "new"]
)
def test_numpy_position_out_of_range(make, place):
    """NumPy accepts any position and reads out of bounds; it raises here."""
    generator = make()
    state = copy.deepcopy(generator_state(generator))
    state["state"]["pos"] = place

    with pytest.raises(ValueError, match="something else was saved"):
        set_generator_state(generator, state)

    assert generator.random() == make().random()


@pytest.mark.parametrize("place", [-1, 5])
def test_philox_position_out_of_range(place):
    """The same applies to the buffer of Philox."""
    generator = np.random.Generator(np.random.Philox(3))
    state = copy.deepcopy(generator_state(generator))
    state["buffer_pos"] = place

    with pytest.raises(ValueError, match="something else was saved"):
        set_generator_state(generator, state)

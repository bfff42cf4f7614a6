"""Derived seeds and the global generators."""

import copy
import random

import numpy
import pytest
import torch
from torch import nn

from composer.core import State
from composer.core.evaluator import evaluation_mode
from composer.core.saving.randomness import (
    check_rng_state,
    derive_seed,
    generator_state,
    load_rng_state,
    preserve_rng_state,
    rng_state,
    seed_globals,
    set_generator_state,
)

CPU = torch.device("cpu")


def draw():
    """Return a number of each global generator."""
    return torch.rand(1).item(), random.random(), numpy.random.rand()  # noqa: NPY002  (the global generator is meant)


class TestDeriveSeed:
    def test_value(self):
        """The hash is fixed across versions, as saved runs depend on it."""
        assert derive_seed(17, "epoch", 3) == 3879320315979715131

    def test_generator_of_the_state(self):
        """A component's generator is seeded by the run's seed, the rank, its key, the batch and the microbatch."""
        state = State(model=None, rank_zero_seed=17)

        generator = state.generator("owner", microbatch=2)

        assert generator.initial_seed() == derive_seed(17, 0, "owner", 0, 2)


class TestGlobalGenerators:
    def test_seed_globals(self):
        """Equal seeds give equal draws of torch, Python and NumPy, also for seeds of 64 bits."""
        draws = []
        with preserve_rng_state():
            for seed in (2**63 + 1, 2**63 + 1, 5):
                seed_globals(seed)
                draws.append(draw())

        assert draws[0] == draws[1]
        assert all(first != other for first, other in zip(draws[0], draws[2], strict=True))

    def test_preserve_rng_state(self):
        """Draws within the block do not change later draws."""
        with preserve_rng_state():
            expected = draw()

        assert draw() == expected

    def test_round_trip(self):
        """Loaded states give the draws that followed when they were saved."""
        states = rng_state(CPU)
        expected = draw()

        load_rng_state(states, CPU)

        assert draw() == expected

    def test_normal_pairs_round_trip(self):
        """Python and NumPy draw normal numbers in pairs; the second one of a pair that has begun is saved, too."""

        def draw_normal():
            return random.gauss(0, 1), numpy.random.standard_normal()  # noqa: NPY002  (the global generator is meant)

        draw_normal()
        states = rng_state(CPU)
        expected = draw_normal()
        draw_normal()

        load_rng_state(states, CPU)

        assert draw_normal() == expected

    def test_check_changes_nothing(self):
        """Valid states are accepted without loading them."""
        states = rng_state(CPU)
        with preserve_rng_state():
            draw()
            expected = draw()
        draw()

        check_rng_state(states, CPU, "rng")

        assert draw() == expected

    @pytest.mark.parametrize(
        ("part", "name", "value"),
        [("numpy", "gauss", "x"), ("python", "version", 9), ("python", "words", None), ("python", "gauss", "x")],
    )
    def test_invalid_states(self, part, name, value):
        """States that no generator accepts raise a ValueError with the path."""
        states = rng_state(CPU)
        states[part][name] = value

        with pytest.raises(ValueError, match=r"^extra\.rng\[0\]"):
            check_rng_state(states, CPU, "extra.rng[0]")


class TestGenerators:
    @pytest.mark.parametrize("place", [-1, 625, 10**6])
    @pytest.mark.parametrize(
        "make",
        [lambda: numpy.random.RandomState(3), lambda: numpy.random.Generator(numpy.random.MT19937(3))],
        ids=["old", "new"],
    )
    def test_numpy_position_out_of_range(self, make, place):
        """NumPy accepts any position and reads out of bounds; it raises here."""
        generator = make()
        state = copy.deepcopy(generator_state(generator))
        state["state"]["pos"] = place

        with pytest.raises(ValueError, match="something else was saved"):
            set_generator_state(generator, state)

        assert generator.random() == make().random()


class TestEvaluationMode:
    def test_modes_are_restored(self):
        """Each module's mode is restored."""
        model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())

        with evaluation_mode(model):
            inside = model.training, model[0].training

        assert inside == (False, False)
        assert [module.training for module in model.modules()] == [True, True, False]

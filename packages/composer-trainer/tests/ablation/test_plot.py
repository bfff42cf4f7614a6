"""The picture of a study."""

import itertools

import attrs
import pytest
from matplotlib import pyplot

from composer.ablation import Study
from composer.ablation.results import Result
from fixtures.studies import SETTINGS, runs


@pytest.fixture(autouse=True)
def closed_figures():
    """Close the figures that a notebook would show."""
    yield
    pyplot.close("all")


class TestPicture:
    def test_what_is_drawn(self, tmp_path):
        """Each arm is a point with its name, and no line connects the clearly best and fastest one with others."""
        figure = Study(SETTINGS, runs()).plot(tmp_path / "study.png")

        (axes,) = figure.axes
        assert {text.get_text() for text in axes.texts} == {"baseline", "good", "bad"}
        assert not [line for line in axes.lines if line.get_linestyle() == "--"]
        assert (tmp_path / "study.png").stat().st_size > 10_000

    @pytest.mark.parametrize(("noise", "is_joined"), [(0.001, True), (0.1, False)])
    def test_what_is_joined(self, noise, is_joined):
        """Slower and better arms are joined if their intervals distinguish them, and never with one seed."""
        gains = {(): 0.0, ("good",): 0.05, ("better",): 0.1}
        results = []
        for seed, (arm, gain) in itertools.product(range(4), gains.items()):
            seconds = 10.0 + 100 * gain + 0.01 * seed
            value = 0.8 + gain + noise * (seed * (1 + len(arm)) % 3)
            results.append(Result(arm, seed, ((seconds, value),), seconds))

        several, one = (
            Study(attrs.evolve(SETTINGS, seeds=seeds), results).plot().axes[0].lines for seeds in (range(4), (0,))
        )

        lines = [line.get_xdata().tolist() for line in several if line.get_linestyle() == "--"]
        assert lines == ([[10.015, 15.015, 20.015]] if is_joined else [])
        assert not [line for line in one if line.get_linestyle() == "--"]

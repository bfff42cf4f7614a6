"""The picture of a study."""

import itertools

import attrs
import pytest
from matplotlib import pyplot

from composer.ablation import Study
from composer.ablation.plot import front
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

    def test_labels_do_not_overlap(self):
        """Labels of arms with nearly the same time and quality do not cover each other, or leave the picture."""
        results = [Result((), 0, ((10.0, 0.8),), 10.0)]
        for number in range(8):
            seconds = 10.0 + number / 100
            results.append(Result((f"an algorithm, number {number}",), 0, ((seconds, 0.8 + number / 1e5),), seconds))
        results.append(Result(("far",), 0, ((20.0, 0.9),), 20.0))

        figure = Study(SETTINGS, results).plot()

        figure.draw_without_rendering()
        (axes,) = figure.axes
        places = [text.get_window_extent() for text in axes.texts]
        assert len(places) == 10
        assert not [pair for pair in itertools.combinations(places, 2) if pair[0].overlaps(pair[1])]
        assert all(axes.bbox.containsx(end) for place in places for end in (place.x0, place.x1))

    def test_front(self):
        """A better arm replaces a faster one from which its time does not differ clearly."""
        times = {("a",): 1.0, ("b",): 2.0, ("c",): 3.0, ("d",): 4.0, ("e",): 4.5}
        losses = {("a",): 3.0, ("b",): 2.0, ("c",): 2.5, ("d",): 1.0, ("e",): 0.5}

        found = front(times, lambda one, other: (losses[one] < losses[other], times[one] > times[other] + 0.7))

        assert found == [("a",), ("b",), ("e",)]

    def test_a_notebook_shows_it(self, tmp_path):
        """Without a path, the figure is the current one of pyplot, which notebooks show; a file needs none."""
        Study(SETTINGS, runs()).plot(tmp_path / "study.png")
        assert not pyplot.get_fignums()

        figure = Study(SETTINGS, runs()).plot()

        assert pyplot.gcf() is figure

    def test_nothing_to_draw(self):
        """A study without a result cannot be plotted."""
        with pytest.raises(ValueError, match="must have a result"):
            Study(SETTINGS, []).plot()

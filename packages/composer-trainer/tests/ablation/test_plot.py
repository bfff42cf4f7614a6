"""The picture of a study."""

import pytest

from composer.ablation import Study
from composer.ablation.plot import front
from fixtures.studies import SETTINGS, runs


class TestPicture:
    def test_what_is_drawn(self, tmp_path):
        """Each arm is a point with its name, and the line connects the best trade-offs."""
        figure = Study(SETTINGS, runs()).plot(tmp_path / "study.png")

        (axes,) = figure.axes
        assert {text.get_text() for text in axes.texts} == {"baseline", "good", "bad"}
        assert axes.lines[0].get_xdata().tolist() == [5.0]
        assert (tmp_path / "study.png").stat().st_size > 10_000

    def test_front(self):
        """For a loss, lower and faster points are better."""
        points = {"a": (1.0, 3.0), "b": (2.0, 2.0), "c": (3.0, 2.5), "d": (4.0, 1.0)}

        assert front(points, sign=-1) == ["a", "b", "d"]

    def test_nothing_to_draw(self):
        """A study without a result cannot be plotted."""
        with pytest.raises(ValueError, match="must have a result"):
            Study(SETTINGS, []).plot()

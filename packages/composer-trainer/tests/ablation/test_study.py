"""The table, the data, the picture and the command line."""

import json
import math

import attrs
import pytest

from composer.ablation import Study
from composer.ablation.__main__ import main
from composer.ablation.results import Result
from fixtures.studies import SETTINGS, runs


class TestRows:
    def test_time_to_quality(self):
        """The speed-up is the ratio of the times to the baseline's final quality, here 10 s and 2 s."""
        rows = {row.label: row for row in Study(SETTINGS, runs()).rows}

        assert rows["good"].seconds_to_quality == 2.0
        assert rows["good"].speed_up == 5.0
        assert rows["good"].time_ratio.mean == pytest.approx(0.5)
        assert (rows["bad"].reached, rows["bad"].speed_up) == (0, 0.0)

    def test_half_of_the_runs_reach_the_quality(self):
        """There is no speed-up, and not the mean of one and none."""
        accuracy = {0: 0.95, 1: 0.7}
        half = [Result(("half",), seed, ((1.0, 0.1), (2.0, accuracy[seed])), 2.0) for seed in (0, 1)]

        row = Study(SETTINGS, [*(one for one in runs() if one.seed in accuracy and not one.arm), *half]).rows[1]

        assert (row.reached, row.seconds_to_quality, row.speed_up) == (1, math.inf, 0.0)


class TestData:
    def test_json(self, tmp_path):
        """The file has the rows and all results, as strict JSON."""
        text = Study(SETTINGS, runs()).to_json(tmp_path / "study.json")

        read = json.loads((tmp_path / "study.json").read_text())
        assert json.loads(text) == read
        assert [row["label"] for row in read["rows"]] == ["baseline", "good", "bad"]
        assert len(read["results"]) == 9
        assert read["rows"][2]["seconds_to_quality"] is None

    def test_what_is_stored_is_loaded(self, folder):
        """A loaded study prints the same table."""
        assert str(Study.load(folder)) == str(Study(SETTINGS, runs()))


class TestCommandLine:
    @pytest.mark.parametrize(("form", "beginning"), [("text", "eval/Acc"), ("markdown", "eval/Acc"), ("json", "{")])
    def test_show(self, folder, capsys, form, beginning):
        """The results are printed in each format, and plotted."""
        code = main(["show", str(folder), "--format", form, "--plot", str(folder / "study.svg")])

        assert code == 0
        assert capsys.readouterr().out.startswith(beginning)
        assert (folder / "study.svg").exists()


def test_recipe_beside_a_failed_baseline():
    """An arm that is better with the seeds of both is the recipe, although the baseline failed with another one."""
    results = runs()
    (lost,) = [place for place, one in enumerate(results) if not one.arm and one.seed == 0]
    results[lost] = attrs.evolve(results[lost], failure="NaN")

    assert Study(SETTINGS, runs()).best_recipe() == Study(SETTINGS, results).best_recipe() == ("good",)

"""The table, the data, the picture and the command line."""

import json

import pytest

from composer.ablation import Study
from composer.ablation.__main__ import main
from composer.ablation.plot import front
from composer.ablation.results import Result, ResultsFile, Settings

SETTINGS = Settings("eval/Accuracy", "max", (0, 1, 2), {"good": "Good()", "bad": "Bad()"})


def runs():
    """Return results of three arms: one is better and twice as fast, one fails once and is worse."""
    results = []
    for seed in range(3):
        final = 0.8 + seed / 100
        results += [
            Result((), seed, ((5.0, final - 0.1), (10.0, final)), 10.0, 2**30),
            Result(("good",), seed, ((2.0, final), (5.0, final + 0.05 + seed / 1000)), 5.0, 2**29),
        ]
        failure = "RuntimeError: no memory" if seed == 1 else None
        results.append(
            Result(("bad",), seed, () if failure else ((20.0, 0.5),), None if failure else 20.0, None, 1.0, failure)
        )
    return results


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a stored study."""
    file = ResultsFile(tmp_path / "results.jsonl")
    file.append("settings", SETTINGS)
    for result in runs():
        file.append("result", result)
    return tmp_path


class TestRows:
    def test_time_to_quality(self):
        """The speed-up is the ratio of the times to the baseline's final quality, here 10 s and 2 s."""
        rows = {row.label: row for row in Study(SETTINGS, runs()).rows}

        assert rows["good"].seconds_to_quality == 2.0
        assert rows["good"].speed_up == 5.0
        assert rows["good"].time_ratio.mean == pytest.approx(0.5)
        assert (rows["bad"].reached, rows["bad"].speed_up) == (0, 0.0)

    def test_the_table_names_failures(self):
        """Text and Markdown have a line for each arm, and the reason of each failure."""
        study = Study(SETTINGS, runs())

        for text in (str(study), study.to_markdown()):
            assert "bad failed with seed 1: RuntimeError: no memory" in text
            assert "5.00x" in text
            assert "never (0/2 runs)" in text

    def test_one_seed(self):
        """With one seed there is no interval, and the table states it."""
        study = Study(Settings("eval/Accuracy", "max", (0,), {}), runs())

        assert study.rows[1].difference.low is None
        assert "One seed: there are no intervals" in str(study)
        assert study.best_recipe() == ("good",)

    def test_too_few_seeds(self):
        """Where an interval contains 0, the table states how many seeds would be needed."""
        noisy = [
            Result((arm,) if arm else (), seed, ((1.0, value),), 1.0)
            for arm, values in {"": [0.5, 0.6, 0.7], "noisy": [0.6, 0.5, 0.8]}.items()
            for seed, value in enumerate(values)
        ]

        study = Study(SETTINGS, noisy)

        assert "3 seeds are too few to distinguish these from no effect" in str(study)
        assert "noisy (about 49)" in str(study)
        assert study.best_recipe() == ()

    def test_many_arms(self):
        """Where an interval excludes 0 but the adjusted p-value is not small, the table states it."""
        gains = {"a": [0.02, 0.03, 0.045], "b": [0.01, -0.01, 0.0], "c": [0.02, 0.0, -0.03]}
        results = [Result((), seed, ((1.0, 0.5),), 1.0) for seed in range(3)]
        for name, values in gains.items():
            results += [Result((name,), seed, ((1.0, 0.5 + gain),), 1.0) for seed, gain in enumerate(values)]

        among_three, alone = Study(SETTINGS, results), Study(SETTINGS, results[:6])

        assert "3 arms are compared with the baseline" in str(among_three)
        assert "these differences may be chance: a." in str(among_three)
        assert "may be chance" not in str(alone)


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

    @pytest.mark.parametrize(
        "line", ["[1]", '{"result": {"arm": "../up", "seed": 0}}', '{"result": 1}', "{}", "not JSON"]
    )
    def test_damaged_results(self, folder, line):
        """A line that is no result is rejected with its number."""
        with (folder / "results.jsonl").open("a") as file:
            file.write(line + "\n")

        with pytest.raises(ValueError, match="line 11"):
            Study.load(folder)


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


class TestCommandLine:
    @pytest.mark.parametrize(("form", "beginning"), [("text", "eval/Acc"), ("markdown", "eval/Acc"), ("json", "{")])
    def test_show(self, folder, capsys, form, beginning):
        """The results are printed in each format, and plotted."""
        code = main(["show", str(folder), "--format", form, "--plot", str(folder / "study.svg")])

        assert code == 0
        assert capsys.readouterr().out.startswith(beginning)
        assert (folder / "study.svg").exists()

    def test_no_results(self, tmp_path, capsys):
        """A folder without results is an error in one line."""
        assert main(["show", str(tmp_path)]) == 1
        assert "has no results" in capsys.readouterr().err

    def test_a_file_that_calls_ablate(self, tmp_path, capsys):
        """A file that runs a study when it is imported is an error, instead of a study in each run of the study."""
        (tmp_path / "calls.py").write_text("from composer.ablation import ablate\nablate(print, {}, metric='loss')\n")

        assert main(["run", str(tmp_path / "calls.py")]) == 1
        assert "Call it under if __name__ == '__main__':" in capsys.readouterr().err

    def test_a_file_without_trainer(self, tmp_path, capsys):
        """A study's file must define make_trainer."""
        (tmp_path / "empty.py").write_text("algorithms = {}\n")

        assert main(["run", str(tmp_path / "empty.py")]) == 1
        assert "must define make_trainer" in capsys.readouterr().err

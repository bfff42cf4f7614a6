"""The page of a study."""

import re

import pytest

from composer.ablation import Study
from composer.ablation.__main__ import main
from composer.ablation.report import write_report
from fixtures.studies import SETTINGS, runs


def test_a_page_of_a_run_study(study, problem, tmp_path):
    """The page states question, data, results, the settings of methods and baseline, and the versions."""
    measured = study({"bonus": problem.Bonus, "unused": problem.Nothing}, arms=[["bonus"]], seeds=1)

    measured.report(tmp_path / "page.md", "Does it pay?", "Sixty points.")

    page = (tmp_path / "page.md").read_text()
    assert re.match(r"# Does it pay\?\n\n\*\*.* the baseline.*\n\nSixty points\.\n\n!\[", page)
    assert "first evaluation batches" not in page
    assert "capturable" not in page
    assert "optimizers/SGD/nesterov" not in page
    assert (tmp_path / "page.png").exists()
    assert "](page.png)" in page
    assert measured.to_markdown().strip() in page
    assert "| bonus | `Bonus(" in page
    assert "unused" not in page
    assert "| optimizers/SGD/lr | 0.1 |" in page
    assert "| torch |" in page
    assert not re.search(r"\| *\||\| (None|\{\}|\[\]) \|", page)


def test_a_loaded_study(folder):
    """The command line writes the page of a stored study, also of one without a start."""
    assert main(["show", str(folder), "--report", str(folder / "report.md")]) == 0

    page = (folder / "report.md").read_text()
    assert page.startswith("# Which methods pay?")
    assert "## The baseline" not in page
    assert "## Machine and versions" not in page


def test_the_page_answers_the_question(tmp_path):
    """The best arm, its difference and its time where it is clear; or that no arm is better."""
    Study(SETTINGS, runs()).report(tmp_path / "page.md")
    others = [one for one in runs() if one.arm != ("good",)]
    Study(SETTINGS, others).report(tmp_path / "none.md")

    page = (tmp_path / "page.md").read_text()
    assert "**good is better than the baseline: eval/Accuracy is 0.861, and the baseline's 0.81**" in page
    assert "(difference +0.051 [+0.0485, +0.0535]). Its training takes 0.50 times as long." in page
    assert "**No arm is clearly better than the baseline.**" in (tmp_path / "none.md").read_text()


def test_nothing_is_written_without_a_result(tmp_path):
    """A study without a result has no page."""
    with pytest.raises(ValueError, match="must have a result"):
        write_report(Study(SETTINGS, []), tmp_path / "page.md", "", "")

    assert not list(tmp_path.iterdir())


def test_cells_stay_in_their_row(tmp_path):
    """Bars and line ends in settings do not end a cell or a row."""
    settings = type(SETTINGS)("eval/Accuracy", "max", (0, 1, 2), {"good": "Good(a|b\nc)", "bad": "Bad()"})

    Study(settings, runs()).report(tmp_path / "page.md")

    assert r"| good | `Good(a\|b c)` |" in (tmp_path / "page.md").read_text()

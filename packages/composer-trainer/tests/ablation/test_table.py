"""The table of a study, the sentences below it, and its page."""

import re

import pytest

from composer.ablation import Study
from composer.ablation.results import Result, Settings
from fixtures.studies import SETTINGS, runs


def test_the_table_names_failures():
    """Text, Markdown and the table of notebooks have a line for each arm, and the reason of each failure."""
    study = Study(SETTINGS, runs())

    for text in (str(study), study.to_markdown(), study._repr_html_()):
        assert "bad failed with seed 1: RuntimeError: no memory" in text
        assert "5.00x" in text
        assert "not reached (0/2 runs)" in text


def test_too_few_seeds():
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


@pytest.mark.parametrize(("mode", "better", "worse"), [("max", "up", "down"), ("min", "down", "up")])
def test_clear_arms_are_named(mode, better, worse):
    """Arms that are clearly better or worse than the baseline after the adjustment are named, others are not."""
    gains = {"up": [0.1, 0.11, 0.12], "down": [-0.1, -0.11, -0.12], "same": [0.0, 0.0, 0.0], "one": [0.01, 0.02, 0.03]}
    results = [Result((), seed, ((1.0, 0.5),), 1.0) for seed in range(3)]
    for name, values in gains.items():
        results += [Result((name,), seed, ((1.0, 0.5 + gain),), 1.0) for seed, gain in enumerate(values)]

    study = Study(Settings("eval/Score", mode, (0, 1, 2), {}), results)

    named = [one for one in study.sentences() if one.startswith("Clearly")]
    end = "than the baseline, with p-values adjusted for all arms"
    assert named == [f"Clearly better {end}: {better}.", f"Clearly worse {end}: {worse}."]


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


def test_the_page_answers_the_question(tmp_path):
    """The best arm, its difference and its time where it is clear; or that no arm is better."""
    Study(SETTINGS, runs()).report(tmp_path / "page.md")
    others = [one for one in runs() if one.arm != ("good",)]
    Study(SETTINGS, others).report(tmp_path / "none.md")

    page = (tmp_path / "page.md").read_text()
    assert "**good is better than the baseline: eval/Accuracy is 0.861, and the baseline's 0.81**" in page
    assert "(difference +0.051 [+0.0485, +0.0535]). Its training takes 0.50 times as long." in page
    assert "**No arm is clearly better than the baseline.**" in (tmp_path / "none.md").read_text()

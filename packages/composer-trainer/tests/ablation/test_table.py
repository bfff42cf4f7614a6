"""The table of a study and the sentences below it."""

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


def test_one_seed():
    """With one seed there is no interval, and the table states it."""
    study = Study(Settings("eval/Accuracy", "max", (0,), {}), runs())

    assert study.rows[1].difference.low is None
    assert "One seed: there are no intervals" in str(study)
    assert study.best_recipe() == ("good",)


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


def test_many_arms():
    """Where an interval excludes 0 but the adjusted p-value is not small, the table states it."""
    gains = {"a": [0.02, 0.03, 0.045], "b": [0.01, -0.01, 0.0], "c": [0.02, 0.0, -0.03]}
    results = [Result((), seed, ((1.0, 0.5),), 1.0) for seed in range(3)]
    for name, values in gains.items():
        results += [Result((name,), seed, ((1.0, 0.5 + gain),), 1.0) for seed, gain in enumerate(values)]

    among_three, alone = Study(SETTINGS, results), Study(SETTINGS, results[:6])

    assert "3 arms are compared with the baseline" in str(among_three)
    assert "these differences may be chance: a." in str(among_three)
    assert "may be chance" not in str(alone)


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

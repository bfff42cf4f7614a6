"""The results of runs, and their file."""

import json
import math

import attrs
import pytest

from composer.ablation import Study
from composer.ablation.results import Result, ResultsFile, Settings
from fixtures.studies import SETTINGS, runs


def test_what_is_appended_is_read(tmp_path):
    """Another reader of the file gets equal settings and results, without the rest of an unfinished line."""
    file = ResultsFile(tmp_path / "new" / "results.jsonl")
    start = Result((), 0, settings={"first training loss": "1.5"})
    file.append("settings", SETTINGS)
    file.append("start", start)
    for result in runs():
        file.append("result", result)
    with file.path.open("a") as damaged:
        damaged.write('{"result": {"arm"')

    again = ResultsFile(file.path)
    again.append("result", runs()[0])

    assert (again.settings, again.start, again.results) == (SETTINGS, start, [*runs(), runs()[0]])
    assert ResultsFile(file.path).results == again.results


@pytest.mark.parametrize("line", ["[1]", '{"result": {"arm": "../up", "seed": 0}}', '{"result": 1}', "{}", "not JSON"])
def test_damaged_results(folder, line):
    """A line that is no result is rejected with its number."""
    with (folder / "results.jsonl").open("a") as file:
        file.write(line + "\n")

    with pytest.raises(ValueError, match="line 11"):
        Study.load(folder)


@pytest.mark.parametrize(("curve", "seconds"), [((), 1.0), (((1.0, 0.5),), 5e-324), (((1.0, math.nan),), 1.0)])
def test_results_without_numbers(folder, curve, seconds):
    """A run that did not fail has a curve of finite values and a time."""
    result = Result((), 5, curve, seconds)
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps({"result": attrs.asdict(result)}) + "\n")

    with pytest.raises(ValueError, match=r"line 11.*a run that did not fail has a curve of finite values"):
        Study.load(folder)


def test_differences_of_runs():
    """Digests and settings are compared where both runs have them; a loss may be rounded differently."""
    one = Result((), 0, batches="a", weights="w", settings={"first training loss": "1.5", "lr": "0.1"})

    assert one.differences(Result((), 0)) == []
    assert one.differences(Result((), 0, batches="b", weights="w")) == ["first training batches"]
    changed = Result((), 0, settings={"first training loss": "1.5001", "lr": "0.2"})
    assert one.differences(changed) == ["lr (0.1, now 0.2)"]


@pytest.mark.parametrize(
    ("rough", "hardware", "expected"), [(True, "a", True), (False, "a", False), (False, "b", True)]
)
def test_rough_times(rough, hardware, expected):
    """Times are rough if runs were beside each other, or on other hardware."""
    settings = Settings("m", "max", (0,), {}, is_rough=rough, environment={"hardware": "a"})

    assert settings.is_rough_for({"hardware": hardware}) is expected

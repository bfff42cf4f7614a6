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


@pytest.mark.parametrize(
    ("curve", "seconds"),
    [
        ((), 1.0),
        (((1.0, 0.5),), None),
        (((1.0, 0.5),), 0.0),
        (((1.0, 0.5),), math.inf),
        (((1.0, 0.5),), 5e-324),
        (((1.0, 0.5),), 1e308),
        (((1.0, math.nan),), 1.0),
        (((math.inf, 0.5),), 1.0),
    ],
)
def test_results_without_numbers(folder, curve, seconds):
    """A run that did not fail has a curve of finite values and a time."""
    result = Result((), 5, curve, seconds)
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps({"result": attrs.asdict(result)}) + "\n")

    with pytest.raises(ValueError, match=r"line 11.*a run that did not fail has a curve of finite values"):
        Study.load(folder)


def test_lines_without_later_fields(folder):
    """A study that was written before a field existed can be read."""
    path = folder / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines.append({"start": next(line["result"] for line in lines if "result" in line)})
    for line in lines:
        for value in line.values():
            for name in ("clock", "warnings", "mode") if "arm" in value else ("clock",):
                value.pop(name, None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    study = Study.load(folder)

    assert (study.settings.clock, study.results[0].warnings, study.results[0].mode) == ("wall", (), "")


def test_differences_of_settings():
    """Results of another metric, or of an algorithm with other settings, cannot be compared; further arms can."""
    other = Settings("eval/Loss", "min", (0,), {"good": "Good(1)", "new": "New()"})

    assert SETTINGS.differences(other) == ["metric", "algorithms['good']"]
    assert SETTINGS.differences(Settings("eval/Accuracy", "max", (5,), {"new": "New()"})) == []
    assert (SETTINGS.sign, other.sign) == (1, -1)


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

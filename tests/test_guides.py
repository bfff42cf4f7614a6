"""The tables of the pages match the algorithms and the measurements."""

import importlib.util
import itertools
import json
import re
import statistics
from pathlib import Path

import pytest
import torch

import composer.algorithms
from composer.core import AlgorithmConflictError, Event, explain

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path for path in DOCS.glob("*/*.md") if "<!-- table: " in path.read_text())
CARDS = sorted(path for path in DOCS.glob("methods/*.md") if path.name != "README.md")
SETTINGS = {
    "Alibi": {"max_sequence_length": 8},
    "Augment": {"augmentation": torch.nn.ReLU()},
    "Distillation": {"teacher": torch.nn.Identity()},
    "GradientClipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
    "PostHocEMA": {"folder": "averages"},
    "StochasticDepth": {"target_layer_name": "ResNetBottleneck"},
}


@pytest.fixture(scope="module")
def tables():
    """Return the program that writes the tables."""
    spec = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(kind):
    return kind(**SETTINGS.get(kind.__name__, {}))


def rows(guide, table):
    """Return the rows of a table of a guide, as lists of cells."""
    text = (DOCS / "guides" / guide).read_text()
    (result,) = re.findall(rf"<!-- table: {table} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.splitlines()[2:]]


def pairs(cell):
    """Return the pairs of names in a cell."""
    names = cell.split(", ")
    return {frozenset(pair) for pair in itertools.combinations(names, 2)}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_tables_are_what_would_be_written(page, tables):
    """The tables are up to date; otherwise run ``python docs/tables.py``."""
    assert tables.with_tables(page.read_text()) == page.read_text()


def test_drawing_is_what_would_be_written(tables):
    """The drawing of a plan is up to date; otherwise run ``python docs/tables.py``."""
    assert tables.plan_svg() == tables.PLAN.read_text()


def test_every_page_with_a_table_is_written(tables):
    """The program writes the pages of all folders that have tables."""
    assert set(PAGES) <= set(tables.PAGES)


def test_every_measured_method_has_its_table(tables):
    """The card of each algorithm that a study measured alone has the table of the measurements."""
    studies = {name: study for name, study in tables.studies().items() if name in tables.TASKS}
    names = {tables.card_of(name, study) for study in studies.values() for name in study.settings.algorithms}
    cards = {path.name: path.read_text() for path in (DOCS / "methods").glob("*.md")}
    linked = dict(re.findall(r"\[(\w+)\]\((\w+\.md)\)", cards["README.md"]))

    assert {"BlurPool", "Muon", "WarmupStableDecayScheduler"} <= names
    no_methods = {
        "FewerEpochs",
        "FewerBytes",
        "Half",
        "FewRowsFirst",
        "NineTenths",
        "ScheduledBatches",
        "SixTenths",
    }  # other data or lengths, and a method that was removed
    for kind in names - no_methods:
        assert f"<!-- table: measured {kind} -->" in cards[linked[kind]]


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.stem)
def test_every_setting_is_described(card, tables):
    """A card describes each setting of its algorithm, below their defaults."""
    text = card.read_text()
    settings = tables.settings_of(text.partition("\n")[0].removeprefix("# "))
    (described,) = re.findall(r"<!-- table: defaults .*?<!-- end -->(.*?)^## ", text, re.DOTALL | re.MULTILINE)

    assert [name for name in settings if f"`{name}`" not in described] == []


def test_every_algorithm_has_a_card(tables):
    """The index of methods has a row for each algorithm, and the README states how many there are."""
    index, readme = (DOCS / "methods" / "README.md").read_text(), (DOCS.parent / "README.md").read_text()
    cards = {name: DOCS / "methods" / page for name, page in re.findall(r"^\| \[(\w+)\]\((\w+\.md)\)", index, re.M)}
    names = {kind.__name__ for kind in tables.algorithms()}

    assert names <= cards.keys()
    assert {card.read_text().partition("\n")[0] for card in cards.values()} == {f"# {name}" for name in cards}
    assert set(CARDS) == set(cards.values())
    assert f"It has {len(names)} methods" in readme
    assert f"[{len(names)}, with a card each]" in readme


def test_measured_differences_are_those_of_the_runs(tables):
    """A card has the mean difference between the runs of the method and those of the baseline."""
    lines = (DOCS / "evidence" / "few_labels" / "results.jsonl").read_text().splitlines()
    results = [entry["result"] for entry in map(json.loads, lines) if "result" in entry]

    def mean(arm):
        return statistics.mean(one["curve"][-1][1] for one in results if one["arm"] == arm)

    assert f"{mean(['BlurPool']) - mean([]):+.3g} (" in tables.measured("BlurPool")


def test_a_wrong_table_is_found(tables):
    """A manually edited line is replaced."""
    text = "<!-- table: twice -->\n| BlurPool | fine |\n<!-- end -->\n"

    assert "BlurPool" not in tables.with_tables(text)


def conflicts(*algorithms):
    try:
        explain(algorithms)
    except AlgorithmConflictError:
        return True
    return False


def test_refused_pairs(tables):
    """Exactly the pairs in the table raise an error, and two algorithms of each class in it."""
    owners = [who for _, who, _ in rows("order_and_conflicts.md", "owners")]
    kinds = tables.algorithms()

    result = {
        frozenset({one.__name__, other.__name__})
        for one, other in itertools.combinations(kinds, 2)
        if conflicts(make(one), make(other))
    }
    alone = {kind.__name__ for kind in kinds if conflicts(make(kind), make(kind))}

    assert result == set().union(*map(pairs, owners))
    assert alone == {name for who in owners for name in who.split(", ")}


def test_twice(tables):
    """Every algorithm is in one of the two tables: two raise an error, or two are allowed."""
    exclusive = {name for _, who, _ in rows("order_and_conflicts.md", "owners") for name in who.split(", ")}
    twice = {name for name, _ in rows("order_and_conflicts.md", "twice")}

    assert not exclusive & twice
    assert exclusive | twice == {kind.__name__ for kind in tables.algorithms()}


@pytest.mark.filterwarnings("ignore:.*all interpolate the loss")
def test_order_of_the_list(tables):
    """Swapping two algorithms in the list changes the order only for pairs in the table."""
    table = rows("order_and_conflicts.md", "same_stage")
    meeting = {
        event: set().union(*(pairs(who) for at, _, who, _ in table if at == f"`{event.value}`")) for event in Event
    }

    changed = {event: set() for event in Event}
    for one, other in itertools.combinations(tables.algorithms(), 2):
        first, second = make(one), make(other)
        if conflicts(first, second):
            continue
        there, back = (explain(both).entries for both in ([first, second], [second, first]))
        for event in Event:
            if [entry.key for entry in there.get(event, ())] != [entry.key for entry in back.get(event, ())]:
                changed[event].add(frozenset({one.__name__, other.__name__}))

    assert all(changed[event] <= meeting[event] for event in Event)
    assert changed[Event.INIT] >= {frozenset({"BlurPool", "SqueezeExcite"}), frozenset({"Factorize", "NoOpModel"})}
    assert changed[Event.BEFORE_FORWARD] == {frozenset({"CutMix", "MixUp"})}


def test_every_event_and_algorithm_is_in_the_guide(tables):
    """The tables of the guide to events contain all events and algorithms."""
    assert [name for name, _, _ in rows("events.md", "needs")] == [kind.__name__ for kind in tables.algorithms()]
    assert [event for event, _, _ in rows("events.md", "events")] == [f"`{event.value}`" for event in Event]
    assert {kind.__name__ for kind in tables.algorithms()} <= set(composer.algorithms.__all__)

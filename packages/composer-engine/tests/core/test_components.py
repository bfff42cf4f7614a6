"""ObservableList notifies about changes."""

import pytest

from composer.core.components import ObservableList


def check(item):
    if not isinstance(item, str):
        raise TypeError(f"not a string: {item!r}")


@pytest.fixture
def changes():
    return []


@pytest.fixture
def names(changes):
    names = ObservableList(["a", "b", "c"], check)
    names.on_change.append(lambda: changes.append(list(names)))
    return names


CHANGES = {
    "append": lambda names: names.append("d"),
    "insert": lambda names: names.insert(1, "d"),
    "extend": lambda names: names.extend(name for name in "de"),
    "remove": lambda names: names.remove("b"),
    "pop": lambda names: names.pop(),
    "del": lambda names: names.__delitem__(0),
    "del slice": lambda names: names.__delitem__(slice(1, None)),
    "set": lambda names: names.__setitem__(0, "d"),
    "set slice": lambda names: names.__setitem__(slice(None), iter("xyz")),
    "reverse": lambda names: names.reverse(),
    "clear": lambda names: names.clear(),
    "+=": lambda names: names.__iadd__(["d"]),
    "sort": lambda names: names.sort(key=lambda name: -ord(name)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_mutations_match_list_and_notify(name, names, changes):
    """Every mutation matches that of a list, and the last notification has the final contents."""
    plain = ["a", "b", "c"]

    CHANGES[name](plain)
    CHANGES[name](names)

    assert names == plain
    assert changes[-1] == plain


def test_reads_match_list(names, changes):
    """Iteration, membership, slices and sums match those of a list and send no notification."""
    assert [*names] == ["a", "b", "c"]
    assert ("b" in names, "x" in names, len(names), names.index("c")) == (True, False, 3, 2)
    assert (names[0], names[-1], names[1:]) == ("a", "c", ["b", "c"])
    more = ["d"]
    assert (names + more, more + names, names.copy()) == (["a", "b", "c", "d"], ["d", "a", "b", "c"], ["a", "b", "c"])
    assert repr(names) == "['a', 'b', 'c']"
    assert changes == []


def test_iteration_during_mutation_matches_list(names):
    """Items may be added during iteration."""
    for name in names:
        if len(names) < 5:
            names.append(name)

    assert names == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize(
    "change",
    [
        lambda names: names.append(1),
        lambda names: names.insert(0, 1),
        lambda names: names.extend(["d", 1]),
        lambda names: names.__setitem__(0, 1),
        lambda names: names.__setitem__(slice(None), ["d", 1]),
    ],
)
def test_invalid_items_change_nothing(change, names, changes):
    """If one item is invalid, none is added and no notification is sent."""
    with pytest.raises(TypeError, match="not a string: 1"):
        change(names)

    assert names == ["a", "b", "c"]
    assert changes == []


def test_initial_items_are_checked():
    """Initial items are validated too."""
    with pytest.raises(TypeError, match="not a string"):
        ObservableList([1], check)


def test_equality():
    """It equals a list of the same items, and is not hashable."""
    assert ObservableList(["a"], check) == ObservableList(["a"], check) == ["a"]
    assert ObservableList(["a"], check) != ["b"]
    with pytest.raises(TypeError, match="unhashable"):
        hash(ObservableList([], check))

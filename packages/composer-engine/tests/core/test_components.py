"""The list that tells when it has been changed."""

import pytest

from composer.core.components import ObservableList


def check(item):
    if not isinstance(item, str):
        raise TypeError(f"not a text: {item!r}")


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
def test_changes_as_a_list_does_and_tells(name, names, changes):
    """Every way to change a list works, and the last thing told is what is in it then."""
    plain = ["a", "b", "c"]

    CHANGES[name](plain)
    CHANGES[name](names)

    assert names == plain
    assert changes[-1] == plain


def test_reads_as_a_list_does(names, changes):
    """Iteration, membership, slices and sums are those of a list, and tell nobody."""
    assert [*names] == ["a", "b", "c"]
    assert ("b" in names, "x" in names, len(names), names.index("c")) == (True, False, 3, 2)
    assert (names[0], names[-1], names[1:]) == ("a", "c", ["b", "c"])
    more = ["d"]
    assert (names + more, more + names, names.copy()) == (["a", "b", "c", "d"], ["d", "a", "b", "c"], ["a", "b", "c"])
    assert repr(names) == "['a', 'b', 'c']"
    assert changes == []


def test_loop_over_a_changing_list_is_that_of_a_list(names):
    """Items may be added while someone iterates."""
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
def test_refused_items_change_nothing(change, names, changes):
    """If one item does not belong into the list, none is added and nobody is told."""
    with pytest.raises(TypeError, match="not a text: 1"):
        change(names)

    assert names == ["a", "b", "c"]
    assert changes == []


def test_first_items_are_checked():
    """Also what a list begins with must belong into it."""
    with pytest.raises(TypeError, match="not a text"):
        ObservableList([1], check)


def test_equality():
    """A list of components equals a list of the same items, and is no key."""
    assert ObservableList(["a"], check) == ObservableList(["a"], check) == ["a"]
    assert ObservableList(["a"], check) != ["b"]
    with pytest.raises(TypeError, match="unhashable"):
        hash(ObservableList([], check))

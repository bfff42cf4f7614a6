"""A list that reports changes behaves as a list, and rejects items before it changes."""

import pytest

from composer.core.observable_list import ObservableList


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

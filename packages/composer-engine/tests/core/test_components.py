"""The list that tells when it has been changed."""

import pytest
import torch
from torch import nn

from composer.core import Engine, Event, Stage, State
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
    """Every way to change a list works, and the last notification has its contents."""
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
    """If one item is invalid, none is added and there is no notification."""
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


def surgery(make, act, event=Event.INIT):
    """Return an algorithm that changes the model by ``act(state)``."""
    return make.algorithm("Surgery", {event: Stage.ARCHITECTURE}, apply=lambda self, event, state, logger: act(state))


def replace_layer(state):
    state.model[0] = nn.Linear(4, 3)


def move_over(state):
    replace_layer(state)
    state.optimizers[0].param_groups[0]["params"] = list(state.model.parameters())


def run(state, make, *acts, event=Event.INIT):
    engine = Engine(state, algorithms=[surgery(make, act, event) for act in acts])
    engine.run_event(event)


@pytest.mark.parametrize("event", [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START])
def test_stale_parameters_are_an_error(state, make, event):
    """The optimizer still has the old layer: the error has the names, the cause and the fix."""
    with pytest.raises(
        RuntimeError, match=r"^Surgery replaced .* the former '0\.weight', '0\.bias', .*optimizers=state\.optimizers"
    ):
        run(state, make, replace_layer, event=event)


def test_culprit_is_the_one_that_did_it(state, make):
    """Of several algorithms the one that replaced the parameters is named."""
    with pytest.raises(RuntimeError, match=r"^Surgery\.1 replaced"):
        run(state, make, move_over, replace_layer, move_over)


def test_stale_in_any_optimizer(state, make, model):
    """All optimizers and all their groups are looked at."""
    one, two = model.parameters().__next__(), list(model.parameters())[1:]
    state.optimizers = [torch.optim.SGD([one], 0.1), torch.optim.SGD([{"params": two[:1]}, {"params": two[1:]}], 0.1)]

    def replace_last(state):
        state.model[1].bias = nn.Parameter(torch.zeros(2))

    with pytest.raises(RuntimeError, match=r"former '1\.bias',"):
        run(state, make, replace_last)


def test_parameters_moved_over_are_fine(state, make):
    """Surgery that takes the optimizer along passes."""
    run(state, make, move_over)

    held = {id(one) for one in state.optimizers[0].param_groups[0]["params"]}
    assert held == {id(one) for one in state.model.parameters()}


def test_missing_parameters_are_an_error(state, make):
    """The optimizer held everything, and a layer was added without it."""

    def add(state):
        state.model.append(nn.Linear(2, 1))

    with pytest.raises(
        RuntimeError, match=r"Surgery gave the model new parameters that no optimizer holds, '2\.weight'"
    ):
        run(state, make, add)


def test_replaced_parameter_that_was_only_taken_out_is_missing(state, make, model):
    """Also where the optimizer holds a part: what it held by that name, it has to hold again."""
    state.optimizers = torch.optim.SGD(model[0].parameters(), lr=0.1)

    def forget(state):
        replace_layer(state)
        state.optimizers[0].param_groups[0]["params"] = []
        state.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    with pytest.raises(RuntimeError, match=r"no optimizer holds, '0\.weight', '0\.bias'"):
        run(state, make, forget)


def test_what_no_optimizer_held_is_the_user_s_choice(state, make, model):
    """With an optimizer for the last layer alone, the first may be replaced as one likes."""
    state.optimizers = torch.optim.SGD(model[1].parameters(), lr=0.1)

    former = model[0]

    run(state, make, replace_layer)

    assert state.model[0] is not former


def test_new_parameters_may_be_frozen(state, make):
    """What does not learn need not be in an optimizer."""

    def add_frozen(state):
        state.model.append(nn.Linear(2, 1).requires_grad_(False))

    run(state, make, add_frozen)

    assert not state.model[-1].weight.requires_grad


def test_strangers_in_the_optimizer_are_the_user_s_choice(state, make, model):
    """An optimizer may hold what has never been in the model, as a loss's own parameters."""
    stranger = nn.Parameter(torch.zeros(1))
    state.optimizers[0].add_param_group({"params": [stranger]})

    run(state, make, move_over)

    assert state.optimizers[0].param_groups[1]["params"] == [stranger]


def test_without_optimizers_there_is_nothing_to_check(make, model):
    """The optimizer may be made later."""
    former = model[0]

    run(State(model=model), make, replace_layer)

    assert model[0] is not former


@pytest.mark.parametrize("thing", [None, "model", lambda batch: batch])
def test_models_may_be_anything(make, thing):
    """What is no module has no parameters."""
    seen = []

    run(State(model=thing), make, lambda state: seen.append(state.model))

    assert seen == [thing]


def test_many_names_are_cut_short(make):
    """Three names are enough to find the place."""
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(4)])
    state = State(model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))

    def replace_all(state):
        state.model = nn.Linear(1, 1)

    with pytest.raises(RuntimeError, match=r"'0\.weight', '0\.bias', '1\.weight' and 5 more"):
        run(state, make, replace_all)


def test_callbacks_are_checked_too(state, make):
    """A callback that replaces layers is named as well."""
    callback = make.callback("Watch", "init")
    type(callback).init = lambda self, state, logger: replace_layer(state)
    state.callbacks.append(callback)

    with pytest.raises(RuntimeError, match=r"^Watch replaced"):
        Engine(state).run_event("init")


@pytest.mark.parametrize(
    "event", [event for event in Event if event not in {"init", "before_load", "after_load", "fit_start"}]
)
def test_other_events_are_not_checked(state, make, event, monkeypatch):
    """During training nobody walks over the parameters."""
    monkeypatch.setattr(nn.Module, "named_parameters", None)

    seen = []

    run(state, make, seen.append, event=event)

    assert seen == [state]

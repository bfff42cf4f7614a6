"""A view of the state records what an algorithm reads and writes."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

from composer.core import Event, State
from composer.core.testing import Effects, RecordingState, Watch, observe
from fixtures.noise import Keyed, changed, make_state


@pytest.fixture
def batch_state():
    """Return a function that creates a state with a batch."""

    def make(batch):
        state = State(model=None)
        state.batch = batch
        return state

    return make


Pair = namedtuple("Pair", ["image", "label"])


class TestRecordingState:
    def test_unpacking_is_not_a_read(self, batch_state):
        """Passing the target on unchanged is not a read, and preserves the object."""
        target = torch.ones(2)
        state = batch_state((torch.ones(2), target))

        def act(view):
            input, kept = view.batch
            view.batch = (input + 1, kept)

        assert observe(state, None, act) == Effects({"batch.input"}, {"batch.input"})
        assert state.batch[1] is target
        assert type(state.batch[0]) is torch.Tensor

    @pytest.mark.parametrize(
        "look",
        [
            lambda target: target.shape,
            lambda target: torch.cat([target, target]),
            lambda target: target.tolist(),
            lambda target: target + 1,
            lambda target: nn.functional.relu(input=target),
        ],
    )
    def test_any_use_is_a_read(self, batch_state, look):
        """Shapes, functions, methods, operators and keyword arguments are reads; results are ordinary tensors."""
        view = RecordingState(batch_state((torch.ones(2), torch.ones(2))))

        result = look(view.batch[1])

        assert view.effects == Effects({"batch.target"})
        assert not isinstance(result, torch.Tensor) or type(result) is torch.Tensor

    def test_gradients_flow_through(self, batch_state):
        """Gradients flow through a batch of the view."""
        input = torch.ones(2, requires_grad=True)

        RecordingState(batch_state([input])).batch[0].sum().backward()

        assert torch.equal(input.grad, torch.ones(2))

    def test_writing_in_place(self, batch_state):
        """Writes in place are detected even with equal values, and change the batch."""
        state = batch_state((torch.ones(2), torch.zeros(2)))

        effects = observe(state, None, lambda view: view.batch[0].mul_(1))

        assert effects.writes == {"batch.input"}

    @pytest.mark.parametrize(
        ("batch", "keys", "words"),
        [
            (("x", "y", "w"), (), ["batch.input", "batch.target", "batch.2"]),
            (["x", "y"], (1, 0), ["batch.target", "batch.input"]),
            (("x", "y"), (-1, -2), ["batch.target", "batch.input"]),
            (Pair("x", "y"), ("label", "image"), ["batch.target", "batch.input"]),
            (Pair("x", "y"), (), ["batch.input", "batch.target"]),
            ({"a": "x", "b": "y", "c": "w"}, ("b", "a"), ["batch.target", "batch.input", "batch.c"]),
            ({"input_ids": "x", "labels": "y", "mask": "w"}, (), ["batch.input", "batch.target", "batch.input"]),
            (OrderedDict(image="x"), (), ["batch.input"]),
        ],
    )
    def test_names_of_items(self, batch_state, batch, keys, words):
        """The input and the target are found by the algorithm's keys or by convention."""
        values = {letter: torch.full((1,), float(place)) for place, letter in enumerate("xyw")}
        items = batch.items() if isinstance(batch, dict) else enumerate(batch)
        filled = {key: values[value] for key, value in items}
        if not isinstance(batch, dict):
            filled = type(batch)(*filled.values()) if isinstance(batch, Pair) else type(batch)(filled.values())
        algorithm = Keyed(input_key=keys[0], target_key=keys[1]) if keys else None

        for key, word in zip(range(len(words)) if not isinstance(batch, dict) else batch, words, strict=True):
            view = RecordingState(batch_state(filled), algorithm)
            view.batch[key].sum()
            assert view.effects.reads == {word}

    def test_item_by_key(self, batch_state):
        """Getting an item is a read."""
        view = RecordingState(
            batch_state({"x": torch.ones(1), "y": torch.ones(1)}), Keyed(input_key="x", target_key="y")
        )

        view.batch_get_item("y")

        assert view.effects.reads == {"batch.target"}

    def test_parameters_of_an_optimizer(self):
        """An optimizer that holds another parameter has changed, one whose parameters have changed has not."""
        model = torch.nn.Linear(1, 1)
        state = State(model, optimizers=torch.optim.SGD([model.weight], lr=0.1))

        held = state.optimizers[0].param_groups[0]["params"]

        assert observe(state, None, lambda _: model.weight.data.add_(1)).writes == {"model"}
        assert observe(state, None, lambda _: held.append(model.bias)).writes == {"optimizers"}


class TestWatch:
    def test_other_algorithms_are_not_wrapped(self):
        """Only the watched algorithm receives a view of the state."""
        states = []

        def look(self, event, state, logger):
            states.append(type(state))

        other, watched = (changed(apply=look).make() for _ in range(2))
        state = make_state()

        Watch(watched).make_engine(state, algorithms=[watched, other]).run_event(Event.BATCH_END)

        assert states == [RecordingState, State]

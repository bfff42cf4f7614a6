"""The orders of loaders that are not torch's ``DataLoader``."""

import random
import sys

import numpy as np
import torch

from composer.trainer.data.order import make_order


class TestOtherLoaders:
    def test_generator_function(self):
        """An iterable has equal draws again, from any batch on."""

        class Batches:
            def __iter__(self):
                for _ in range(4):
                    yield torch.rand(2)

        order = make_order(Batches(), seed=17)
        torch.manual_seed(3)

        complete, rest = list(order.begin(1)), list(order.begin(1, 2))

        assert not order.skips
        assert torch.equal(torch.stack(complete[2:]), torch.stack(rest))
        assert not torch.equal(complete[0], next(order.begin(2)))

    def test_order_and_first_batch_have_different_draws(self):
        """An order drawn at the start of an epoch has other numbers than the first batch."""

        def draws():
            return torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002  (the global one)

        class Batches:
            def __iter__(self):
                order = draws()
                return ((order, draws()) for _ in range(2))

        for drawn_first, drawn in make_order(Batches(), seed=17).begin(0):
            assert not torch.equal(drawn_first[0], drawn[0])
            assert drawn_first[1] != drawn[1]
            assert drawn_first[2] != drawn[2]

    def test_stateful_loader_is_not_wrapped(self):
        """A loader with state_dict and load_state_dict saves its position, and its set_epoch is called."""

        class Stateful(list):
            epoch = None

            def set_epoch(self, epoch):
                self.epoch = epoch

            def state_dict(self):
                return {"place": 2}

            def load_state_dict(self, state):
                del self[: state["place"]]

        loader = Stateful([1, 2, 3])
        order = make_order(loader, seed=17)

        rest = list(order.begin(5, 2))

        assert (rest, loader.epoch) == ([1, 2, 3], 5)


class Shuffled:
    """A loader whose state, which it changes in place, has a list of all samples that are left, and their sum."""

    def __init__(self):
        self.state = {"left": list(range(10_000)), "sums": [[0]]}

    def __iter__(self):
        while self.state["left"]:
            sample = self.state["left"].pop()
            self.state["sums"][0][0] += sample
            yield sample

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class TestCopiesOfAState:
    """The state of a loader whose ``__iter__`` is a generator function is copied before some of its batches."""

    def test_are_independent(self):
        """A copy keeps its values when the loader goes on."""
        order = make_order(Shuffled(), seed=17)
        batches = order.begin(0)
        next(batches)
        next(batches)  # the first one after the start that is preceded by a copy

        state, states = order.save(in_epoch=True)
        next(batches)

        assert (state["left"][-1], state["sums"]) == (9_997, [[9_999 + 9_998]])
        assert (states["before"]["state"]["left"][-1], states["before"]["state"]["sums"]) == (9_998, [[9_999]])

    def test_are_cheap(self):
        """The numbers of a long list are copied without a call for each."""
        batches = make_order(Shuffled(), seed=17).begin(0)
        next(batches)
        calls = []
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
        try:
            next(batches)
        finally:
            sys.setprofile(None)

        assert len(calls) < 1000

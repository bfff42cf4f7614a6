"""The orders of loaders that are not torch's ``DataLoader``."""

import random

import numpy as np
import torch

from composer.trainer.data.order import make_order


class TestOtherLoaders:
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

"""ChunkedCrossEntropy in an engine."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from composer.algorithms import ChunkedCrossEntropy, NoOpModel
from composer.core import AlgorithmConflictError, Engine, Event, State, explain


class TestChunkedCrossEntropy:
    def test_a_loop_has_the_same_gradients(self):
        """After INIT a plain loop computes the same loss and gradients, without all logits."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).double()
        inputs, labels = torch.rand(6, 4).double(), torch.tensor([0, 4, -100, 2, 2, 1])
        expected = torch.autograd.grad(cross_entropy(model(inputs), labels), list(model.parameters()))

        Engine(State(model), algorithms=ChunkedCrossEntropy("2", chunk_size=4)).run_event(Event.INIT)
        logits = model(inputs)
        gradients = torch.autograd.grad(cross_entropy(logits, labels), list(model.parameters()))

        assert type(logits) is not torch.Tensor
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-14)

    def test_head_that_is_not_found_raises(self):
        """A model without a head that can be found raises at INIT."""
        engine = Engine(State(nn.Sequential(nn.Flatten(), nn.Linear(4, 2))), algorithms=ChunkedCrossEntropy())

        with pytest.raises(ValueError, match="head must be the name of a plain"):
            engine.run_event(Event.INIT)

    @pytest.mark.parametrize("other", [ChunkedCrossEntropy(), NoOpModel()])
    def test_conflicts(self, other):
        """Two settings for one head conflict, and so does a model without a head."""
        with pytest.raises(AlgorithmConflictError, match="must have the output head"):
            explain([ChunkedCrossEntropy(), other])

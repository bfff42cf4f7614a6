"""NoOpModel: a model that computes nothing."""

import pytest
import torch

from composer.algorithms import LabelSmoothing, NoOpModel
from composer.core import AlgorithmConflictError
from fixtures.surgery import convolutions, start


class TestNoOpModel:
    def test_accepts_any_batch_with_one_weight(self):
        """The model accepts any batch, costs nothing, and has one weight for the optimizer."""
        engine = start(convolutions(), NoOpModel())
        state = engine.state

        state.model.loss(state.model("any batch"), "any batch").backward()
        state.optimizers[0].step()

        assert sum(parameter.numel() for parameter in state.model.parameters()) == 1
        assert len(state.optimizers[0].param_groups[0]["params"]) == 1
        assert state.model.get_metrics(is_train=True) == {}

    def test_loss_of_each_sample(self):
        """With reduction="none" the loss has an entry for each sample."""
        model = start(convolutions(), NoOpModel()).state.model
        batch = torch.rand(4, 3)

        assert model.loss(model(batch), batch, reduction="none").shape == (4,)

    def test_algorithms_that_read_outputs_conflict(self):
        """An algorithm that reads the outputs raises at INIT."""
        with pytest.raises(AlgorithmConflictError, match="LabelSmoothing"):
            start(convolutions(), LabelSmoothing(), NoOpModel())

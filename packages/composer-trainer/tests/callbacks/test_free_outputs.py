"""Outputs are freed early unless something needs them."""

import weakref

import pytest
import torch
from torch import nn

from composer import Trainer
from composer.callbacks import FreeOutputs
from composer.core import Callback
from composer.models import ComposerClassifier


class Watch(Callback):
    """Records the events at which the outputs are alive."""

    def __init__(self):
        self.alive = {}

    def after_forward(self, state, logger):
        self.outputs = weakref.ref(state.outputs)

    def run_event(self, event, state, logger):
        Callback.run_event(self, event, state, logger)
        if event in ("before_loss", "before_backward", "after_backward", "batch_end"):
            self.alive[str(event)] = self.outputs() is not None


class Network(nn.Module):
    """Counts its computations; the backward pass of a sum does not need its outputs."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0

    def forward(self, inputs):
        self.calls += 1
        return self.layer(inputs)


def train(callbacks, train_metrics=None):
    torch.manual_seed(0)
    network = Network()
    model = ComposerClassifier(
        network, num_classes=3, train_metrics=train_metrics, loss_fn=lambda outputs, targets: outputs.sum()
    )
    trainer = Trainer(
        model=model,
        train_dataloader=[(torch.ones(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))] * 2,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="1ep",
        device_train_microbatch_size=2,
        callbacks=callbacks,
        progress_bar=False,
        device="cpu",
        precision="fp32",
    )
    trainer.fit()
    trainer.close()
    return network, trainer


class TestFreeOutputs:
    @pytest.mark.parametrize(("callbacks", "alive"), [([], True), ([FreeOutputs()], False)])
    def test_outputs_are_freed_before_backward(self, callbacks, alive):
        """Outputs are freed after the loss; without the callback they are not."""
        watch = Watch()

        train([*callbacks, watch], train_metrics=[])

        assert watch.alive == {
            "before_loss": True, "before_backward": alive, "after_backward": alive, "batch_end": alive
        }  # fmt: skip

    def test_outputs_are_kept_for_training_metrics(self):
        """If metrics need the outputs they are kept, and nothing is computed twice."""
        watch = Watch()

        network, trainer = train([FreeOutputs(), watch])

        assert watch.alive == {"before_loss": True, "before_backward": True, "after_backward": True, "batch_end": False}
        assert network.calls == 2 * 3
        assert trainer.state.train_metric_values

    def test_does_not_change_training(self):
        """The weights are bit-identical with and without the callback."""
        with_it, _ = train([FreeOutputs()])
        without, _ = train([])

        assert torch.equal(with_it.layer.weight, without.layer.weight)

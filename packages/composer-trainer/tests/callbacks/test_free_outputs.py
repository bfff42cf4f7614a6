"""Outputs are freed early unless something needs them."""

import weakref

import pytest
import torch

from composer.callbacks import FreeOutputs
from composer.core import Callback
from fixtures import make_classifier, make_loader, record, trained, weights


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


def train(callbacks, train_metrics=None):
    # The backward pass of a sum does not need its outputs.
    model = make_classifier(train_metrics=train_metrics, loss_fn=lambda outputs, targets: outputs.sum())
    return trained(
        model=model, train_dataloader=make_loader(12, 6), device_train_microbatch_size=2, callbacks=callbacks
    )


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
        watch, calls = Watch(), record("before_forward", lambda state: 1)

        trainer = train([FreeOutputs(), watch, calls])

        assert watch.alive == {"before_loss": True, "before_backward": True, "after_backward": True, "batch_end": False}
        assert len(calls.values) == 2 * 3
        assert trainer.state.train_metric_values

    def test_does_not_change_training(self):
        """The weights are bit-identical with and without the callback."""
        assert torch.equal(weights(train([FreeOutputs()])), weights(train([])))

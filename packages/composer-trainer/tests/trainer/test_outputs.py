"""How long the outputs of a batch live."""

import weakref

import pytest
import torch
from torch import nn

from composer import Callback, Event, Trainer
from composer.algorithms import LabelSmoothing, MixUp
from composer.callbacks import FreeOutputs, LRMonitor
from composer.models import ComposerClassifier


class Network(nn.Linear):
    """Notes in each backward pass whether its last outputs are still in memory."""

    def __init__(self):
        super().__init__(4, 3)
        self.are_alive = []

    def forward(self, inputs):
        hidden = inputs.clone().requires_grad_()
        outputs = super().forward(hidden)
        outputs_of_batch = weakref.ref(outputs)
        hidden.register_hook(lambda _: self.are_alive.append(outputs_of_batch() is not None))
        return outputs


class Reads(Callback):
    def __init__(self):
        self.shapes = []

    def batch_end(self, state, logger):
        self.shapes.append(tuple(state.outputs.shape))


class ReadsEarly(Callback):
    def after_loss(self, state, logger):
        assert state.outputs is not None


def train(*, metrics=(), subscribed=None, **options):
    network = Network()
    model = ComposerClassifier(network, num_classes=3, train_metrics=None if metrics else [], val_metrics=[])
    batches = [(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))] * 3
    trainer = Trainer(
        model=model,
        train_dataloader=batches,
        optimizers=torch.optim.SGD(model.parameters(), 0.1),
        max_duration="1ep",
        progress_bar=False,
        device="cpu",
        **options,
    )
    if subscribed:
        trainer.engine.on(subscribed, lambda state, logger: None)
    trainer.fit()
    return network.are_alive, trainer.state


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device_train_microbatch_size": 2},
        {"callbacks": [LRMonitor(), ReadsEarly()], "algorithms": [MixUp(), LabelSmoothing()]},
        {"callbacks": [FreeOutputs()]},
        {"subscribed": Event.EPOCH_END},
    ],
    ids=[
        "alone",
        "microbatches",
        "components that read them early",
        "FreeOutputs",
        "subscribed at the end of an epoch",
    ],
)
def test_outputs_do_not_live_in_the_backward_pass(options):
    are_alive, _ = train(**options)

    assert are_alive
    assert not any(are_alive)


@pytest.mark.parametrize("options", [{"metrics": True}, {"subscribed": "batch_end"}], ids=["metrics", "subscribed"])
def test_outputs_live_until_they_are_read(options):
    are_alive, _ = train(**options)

    assert all(are_alive)


def test_a_callback_of_the_user_reads_them_at_the_end_of_a_batch():
    reads = Reads()

    are_alive, _ = train(callbacks=reads)

    assert all(are_alive)
    assert reads.shapes == [(6, 3)] * 3


def test_a_callback_that_is_added_after_an_epoch_reads_them():
    reads = Reads()

    class Adds(Callback):
        def epoch_end(self, state, logger):
            if reads not in state.callbacks:
                state.callbacks.append(reads)

    network = Network()
    model = ComposerClassifier(network, num_classes=3, train_metrics=[], val_metrics=[])
    Trainer(
        model=model,
        train_dataloader=[(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))],
        optimizers=torch.optim.SGD(model.parameters(), 0.1),
        max_duration="2ep",
        progress_bar=False,
        device="cpu",
        callbacks=Adds(),
    ).fit()

    assert network.are_alive == [False, True]
    assert reads.shapes == [(6, 3)]

"""A NaN loss ends a training with the number of its batch."""

import math

import pytest
import torch
from torch import nn

from composer.callbacks import NaNMonitor
from composer.core import Engine, State, Timestamp
from composer.models import ComposerModel
from fixtures import small_run


class Model(ComposerModel):
    """Its loss is the batch's value times a weight, or several of these."""

    def __init__(self, several=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.several = several

    def forward(self, batch):
        return self.weight * batch.mean()

    def loss(self, outputs, batch):
        return outputs if self.several is None else self.several(outputs)


def make(monitor, values, max_duration="3ep", several=None, **options):
    """Return a trainer on batches of 4 samples, whose loss is the value times the weight."""
    model, batches = Model(several), [torch.full((4, 1), float(value)) for value in values]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {"model": model, "optimizers": optimizer, "train_dataloader": batches, "callbacks": monitor}
    return small_run(max_duration=max_duration, **settings, **options)


def end(trainer):
    """Return the error that ends the training and the number of batches before it."""
    with pytest.raises(RuntimeError) as caught:
        trainer.fit()
    return str(caught.value), int(trainer.state.timestamp.batch)


class TestNaNMonitor:
    @pytest.mark.parametrize(
        ("every", "bad", "recorded"),
        [("1ba", 4, 5), ("3ba", 4, 6), ("100ba", 4, 8), (2, 0, 2), ("10sp", 1, 3)],
    )
    def test_names_the_first_bad_batch(self, every, bad, recorded):
        """For any interval, at the latest at the end of the epoch, the first bad batch is reported."""
        values = [math.nan if place >= bad else 1.0 for place in range(8)]

        message, batches = end(make(NaNMonitor(every=every), values))

        assert f"The training loss is not a number (NaN) since batch {bad}, counted from 0" in message
        assert f"detected after {recorded} batches" in message
        assert batches == recorded

    def test_error_has_advice(self):
        """The error mentions the data, the learning rate and anomaly detection."""
        message, _ = end(make(NaNMonitor(), [1.0, math.nan]))

        assert "Check that batch's data" in message
        assert "the learning rate (SGD 0)" in message
        assert "set_detect_anomaly" in message

    @pytest.mark.parametrize(
        ("several", "name"),
        [
            (lambda outputs: {"box": outputs * 0.0, "class": outputs / 0.0 * 0.0}, "class"),
            (lambda outputs: (outputs, outputs / 0.0 * 0.0), "loss1"),
            (lambda outputs: {"total": outputs, "part": (outputs / 0.0 * 0.0).detach()}, "part"),
        ],
    )
    def test_several_losses(self, several, name):
        """The bad one of several losses is reported by name, also if it is not part of the total."""
        message, _ = end(make(NaNMonitor(), [1.0], several=several))

        assert f"The training loss {name!r} is not a number (NaN) since batch 0" in message

    def test_infinite_loss(self):
        """Infinite losses are accepted by default."""

        def infinite_from_2(outputs):
            return outputs + torch.where(outputs.detach() < 2, 0.0, -math.inf)

        trainer = make(NaNMonitor(every="1ba"), [1.0, 2.0], several=infinite_from_2)
        trainer.fit()

        message, _ = end(make(NaNMonitor(every="1ba", infinite=True), [1.0, 2.0], several=infinite_from_2))

        assert trainer.state.timestamp.batch == 6
        assert "The training loss is infinite since batch 1," in message

    def test_advice_for_half_precision(self):
        """With amp_fp16, another precision is the first advice."""
        state = State(model=None, precision="amp_fp16", callbacks=NaNMonitor())
        engine = Engine(state)
        state.loss = torch.tensor(math.nan)
        engine.run_event("after_loss")

        with pytest.raises(RuntimeError, match="The precision is amp_fp16: try 'amp_bf16'"):
            engine.run_event("fit_end")

    def test_does_not_synchronize(self):
        """Between checks no value is read: on the meta device that would raise."""
        state = State(model=None, callbacks=NaNMonitor(every="10ba"))
        engine = Engine(state)
        state.loss = torch.zeros((), device="meta", requires_grad=True)
        for batch in range(9):
            state.timestamp = Timestamp(batch=batch)
            engine.run_event("after_loss")
            state.previous_timestamp, state.timestamp = state.timestamp, Timestamp(batch=batch + 1)
            engine.run_event("batch_end")

        assert [loss.batch for loss in state.callbacks[0]._collected] == list(range(9))
        assert not any(loss.value.requires_grad for loss in state.callbacks[0]._collected)

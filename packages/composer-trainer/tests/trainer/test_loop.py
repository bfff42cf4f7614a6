"""The loop: the order of its events, and its steps."""

import pytest
import torch
from torch import nn

from composer.core import Callback, DataSpec, Event, Timestamp
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from fixtures import full_copy, make_classifier, make_loader, small_run, weights


class TestStep:
    def test_equals_a_plain_loop(self):
        """The weights are bit-identical to a plain loop's."""
        plain_model = make_classifier()
        optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.1)
        for _ in range(2):
            for inputs, targets in make_loader():
                optimizer.zero_grad()
                nn.functional.cross_entropy(plain_model.module(inputs), targets).backward()
                optimizer.step()

        trainer = small_run(model=make_classifier(), max_duration="2ep")
        trainer.fit()

        expected = torch.cat([parameter.detach().flatten() for parameter in plain_model.parameters()])
        assert torch.equal(weights(trainer), expected)

    @pytest.mark.filterwarnings("ignore:device_train_microbatch_size=100 is larger")
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
    def test_microbatches_do_not_change_weights(self, size):
        """Weights are equal for any split of a batch, also an uneven one, up to rounding in float64."""

        def train(microbatch_size):
            loader = DataSpec(
                make_loader(samples=22, batch_size=5),
                batch_transforms=lambda batch: [batch[0].double(), batch[1]],
            )
            trainer = small_run(
                model=make_classifier().double(),
                train_dataloader=loader,
                device_train_microbatch_size=microbatch_size,
                max_duration="3ep",
            )
            trainer.fit()
            return weights(trainer), trainer.state.total_loss

        complete, whole_loss = train(None)
        split, split_loss = train(size)

        torch.testing.assert_close(split, complete, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(split_loss, whole_loss, rtol=1e-12, atol=1e-14)

    def test_several_optimizers_all_step(self):
        """Every optimizer updates its parameters."""
        model = make_classifier()
        first, last = model.module[0], model.module[2]
        before = full_copy(model)
        trainer = small_run(
            model=model,
            optimizers=[torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW(last.parameters())],
            max_duration="1ba",
        )

        trainer.fit()

        assert all(not torch.equal(before[name], new) for name, new in model.named_parameters())

    def test_several_losses_are_summed_and_logged(self):
        """A model with several losses is trained on their sum; each is logged by its name."""

        class TwoLosses(ComposerClassifier):
            def loss(self, outputs, batch):
                cross_entropy = nn.functional.cross_entropy(outputs, batch[1])
                return {"cross_entropy": cross_entropy, "size": outputs.square().mean()}

        torch.manual_seed(0)
        log = InMemoryLogger()
        trainer = small_run(model=TwoLosses(nn.Linear(4, 3), num_classes=3), loggers=log, max_duration="1ba")

        trainer.fit()

        total, *parts = (float(log.data[f"loss/train/{name}"][-1][1]) for name in ("total", "cross_entropy", "size"))
        assert total == pytest.approx(sum(parts))


def test_clock_after_an_epoch():
    """After an epoch the clock has its samples, batches and the epoch."""
    trainer = small_run(max_duration="1ep")

    trainer.fit()

    counted = trainer.state.timestamp
    assert (counted.epoch, counted.batch, counted.sample, counted.batch_in_epoch) == (1, 5, 20, 0)
    assert isinstance(counted, Timestamp)


def test_event_order():
    """Callbacks are called in the order of the event diagram."""
    recorded = []

    class Everything(Callback):
        def run_event(self, event, state, logger):
            recorded.append(event)

    small_run(callbacks=Everything(), max_duration="1ba").fit()

    assert recorded[:4] == [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START]
    assert recorded[-1] is Event.FIT_END

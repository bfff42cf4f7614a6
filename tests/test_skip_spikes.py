"""SkipSpikes in the Trainer: the steps of batches with a spike leave everything as it was."""

import logging

import pytest
import torch

from composer.algorithms import SkipSpikes
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from composer.optim import DecoupledAdamW, DecoupledSGDW, LinearScheduler
from fixtures import trained, weights
from fixtures.models import make_classifier, make_network

optim = torch.optim
PLANTED = {9, 14}
OPTIMIZERS = {
    "Adadelta": (optim.Adadelta, {}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
    "Adam": (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {}),
    "AdamW, fused": (optim.AdamW, {"fused": True, "amsgrad": True}),
    "Adamax": (optim.Adamax, {}),
    "ASGD": (optim.ASGD, {"t0": 4}),
    "DecoupledAdamW": (DecoupledAdamW, {}),
    "DecoupledSGDW": (DecoupledSGDW, {"momentum": 0.9, "weight_decay": 1e-4}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (optim.Rprop, {}),
    "SGD": (optim.SGD, {}),
    "SGD, fused": (optim.SGD, {"fused": True, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD with momentum": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


def batches(planted=PLANTED, factor=1e4, count=20):
    """Return batches of eight samples; the inputs of the planted ones are too large."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 8, 4, generator=generator)
    inputs[sorted(planted)] *= factor
    targets = torch.randint(3, (count, 8), generator=generator)
    return list(zip(inputs, targets, strict=True))


def end(make_optimizer, *algorithms, model=None, **options):
    """Train on the batches; return the weights, the optimizer's state and the trainer."""
    model = make_classifier() if model is None else model
    optimizer = make_optimizer(model.parameters())
    settings = {"train_dataloader": batches(), "schedulers": LinearScheduler(alpha_f=0.1)} | options
    trainer = trained(model=model, optimizers=optimizer, algorithms=algorithms, **settings)
    state = [optimizer.state[weight] for weight in model.parameters()]
    return weights(trainer), state, trainer


def skipping(kind, **settings):
    """Return a function that creates optimizers of a class whose steps for the planted batches do nothing."""

    class Skipping(kind):
        calls = 0

        def step(self, closure=None):
            if closure is not None:
                closure()
            self.calls += 1
            return None if self.calls - 1 in PLANTED else super().step()

    return lambda parameters: Skipping(parameters, lr=0.01, **settings)


def guard(**settings):
    return SkipSpikes("20std", window=8, **settings)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "options", [{}, {"device_train_microbatch_size": 3, "precision": "amp_bf16"}], ids=["whole", "microbatches"]
)
def test_is_the_run_without_the_steps_of_spikes(name, options):
    """Weights and the optimizer's state equal bit for bit those of a run that takes no step for these batches."""
    kind, settings = OPTIMIZERS[name]

    expected, expected_state, _ = end(skipping(kind, **settings), **options)
    found, state, trainer = end(lambda parameters: kind(parameters, lr=0.01, **settings), guard(), **options)

    assert torch.equal(found, expected)
    assert found.isfinite().all()
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)
    assert not torch.equal(found, end(lambda parameters: kind(parameters, lr=0.01, **settings), **options)[0])
    assert not any("found_inf" in vars(optimizer) for optimizer in trainer.state.optimizers)


def test_loss_scaling():
    """With a loss scale, steps of spikes are undone, too, and those that the scaler skips remain skipped."""
    kind, settings = OPTIMIZERS["AdamW, fused"]  # the scaler calls its step in any case

    expected, *_ = end(skipping(kind, **settings), precision="amp_fp16")
    found, *_ = end(lambda parameters: kind(parameters, lr=0.01, **settings), guard(), precision="amp_fp16")

    assert torch.equal(found, expected)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite(fused, value):
    """A batch whose loss is not finite changes nothing, and later batches train."""
    data = batches(planted=())
    data[5][0][0] = value  # before the window has half of its values
    clean = [batch for number, batch in enumerate(data) if number != 5]

    def make(parameters):
        return optim.AdamW(parameters, lr=0.01, fused=fused)

    expected, *_ = end(make, train_dataloader=clean, schedulers=None)
    found, *_ = end(make, guard(), train_dataloader=data, schedulers=None)

    assert torch.equal(found, expected)


def test_counts_and_names_spikes(caplog):
    """The log has the number of spikes at each batch, and at the end of the epoch their batches and samples."""

    class OfPairs(ComposerClassifier):
        def forward(self, batch):
            return super().forward(batch[:2])

        def loss(self, outputs, batch):
            return super().loss(outputs, batch[:2])

    data = [(*batch, torch.arange(8 * number, 8 * number + 8)) for number, batch in enumerate(batches())]
    log, model = InMemoryLogger(), OfPairs(make_network(), num_classes=3, train_metrics=[])
    options = {"model": model, "train_dataloader": data, "loggers": log, "max_duration": "2ep"}
    with caplog.at_level(logging.WARNING, "composer.algorithms.skip_spikes"):
        end(lambda parameters: optim.SGD(parameters, lr=0.01), guard(index_key=2), **options)

    counts = [int(value) for _, value in log.data["spikes/count"]]
    assert counts[:20] == [0] * 9 + [1] * 5 + [2] * 6
    assert counts[-1] == 4
    messages = [record.message for record in caplog.records]
    samples = ", ".join(map(str, range(72, 80)))
    assert messages[0] == f"Batch 9 with the samples {samples} was a spike: SkipSpikes has skipped its step."
    assert [message.split()[1] for message in messages] == ["9", "14", "29", "34"]

"""The noise of gradients of small trainings, compared with those of single samples and closed formulas."""

import itertools

import pytest
import torch
from torch import nn

from composer.algorithms import GradientClipping
from composer.callbacks import GradientNoiseScale
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from fixtures import make_classifier, small_run, trained, vector_batches
from fixtures.processes import run_processes

NAMES = ("scale", "squared_norm", "trace")


def logged(history):
    return {name: history.get_timeseries(f"gradient_noise/{name}")[f"gradient_noise/{name}"] for name in NAMES}


def fit(callback=None, **options):
    """Train, and return the logged values by name."""
    history = InMemoryLogger()
    callback = callback or GradientNoiseScale(batch_log_interval=1)
    trained(callbacks=callback, loggers=history, **{"device_train_microbatch_size": 2} | options)
    return logged(history)


def gradient(model, batch):
    """Return the gradient of a model's loss in 64 bits."""
    loss = model.loss(model(batch), batch)
    return torch.cat([one.flatten().double() for one in torch.autograd.grad(loss, list(model.parameters()))])


def estimates(small, big, small_size, big_size):
    """Return the squared norm and the trace, by the formulas of the paper's appendix."""
    small, big = small.square().sum(), big.square().sum()
    square = (big_size * big - small_size * small) / (big_size - small_size)
    return float(square), float((small - big) / (1 / small_size - 1 / big_size))


class TestMeasurements:
    @pytest.mark.parametrize("algorithms", [None, GradientClipping("norm", 0.01)], ids=["", "clipped"])
    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_first_microbatch_and_batch(self, size, algorithms):
        """The estimates of a batch of 6 are those of its gradients before clipping."""
        model, batches = make_classifier(), vector_batches(1, size=6)
        small, big = (gradient(model, tuple(one[:count] for one in batches[0])) for count in (size, 6))
        expected = estimates(small, big, size, 6)

        found = fit(model=model, train_dataloader=batches, algorithms=algorithms, device_train_microbatch_size=size)

        assert (found["squared_norm"][0], found["trace"][0]) == pytest.approx(expected, rel=1e-4)
        assert found["scale"][0] == pytest.approx(expected[1] / expected[0], rel=1e-4)

    def test_quadratic(self):
        """On a quadratic, the means over all batches of three of four samples are those of the closed formula."""
        place = torch.tensor([[1.0, -2.0, 0.5]])
        noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

        class Quadratic(nn.Module):
            """The loss of a sample is 1/2 |w|² + noise · w, so its gradient is w + noise."""

            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(place.clone())

            def forward(self, batch):
                return batch @ self.weight.T

            def loss(self, outputs, batch):
                return self.weight.square().sum() / 2 + outputs.mean()

        model = Quadratic()
        options = {"model": model, "optimizers": torch.optim.SGD(model.parameters(), lr=0.0)}

        found = fit(
            GradientNoiseScale(batch_log_interval=1, smoothing=0.0),
            train_dataloader=[noise[list(chosen)] for chosen in itertools.product(range(4), repeat=3)],
            **options,
        )

        square, trace = (place + noise.mean(0)).square().sum(), torch.cov(noise.T, correction=0).trace()
        assert sum(found["squared_norm"]) / 64 == pytest.approx(float(square), rel=1e-4)
        assert sum(found["trace"]) / 64 == pytest.approx(float(trace), rel=1e-4)

    def test_tokens(self):
        """If the loss is a mean over tokens, the first microbatch counts by its tokens."""
        inputs, targets = torch.randn(3, 5, 4), torch.randint(3, (3, 5))
        targets[0, 1:] = -100  # one token of 1 + 5 + 5

        class PerToken(ComposerClassifier):
            def loss(self, outputs, batch):
                return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())

            def count_loss_terms(self, batch):
                return (batch[1] != -100).sum()

        model = PerToken(nn.Linear(4, 3), num_classes=3, train_metrics=[])
        small, big = (gradient(model, (inputs[:count], targets[:count])) for count in (1, 3))
        square, trace = estimates(small, big, 1 / 11 * 3, 3)

        found = fit(model=model, train_dataloader=[(inputs, targets)], device_train_microbatch_size=1)

        assert (found["squared_norm"][0], found["trace"][0]) == pytest.approx((square, trace), rel=1e-4)

    def test_does_not_change_the_training(self):
        """A run with the callback has bit-identical weights."""
        runs = [
            trained(callbacks=callbacks, device_train_microbatch_size=2, algorithms=GradientClipping("norm", 0.1))
            for callbacks in (None, GradientNoiseScale(batch_log_interval=1))
        ]

        states = [run.state.model.state_dict() for run in runs]
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


class TestErrors:
    def test_batches_that_are_not_split(self):
        """Without microbatches, fit raises."""
        trainer = small_run(callbacks=GradientNoiseScale(), max_duration="1ep")

        with pytest.raises(ValueError, match=r"batches are not split: give Trainer\(device_train_microbatch_size"):
            trainer.fit()


class TestResume:
    @pytest.mark.parametrize("stop", ["2ba", "3ba"])
    def test_averages_continue(self, stop, tmp_path):
        """A run that is stopped and resumed logs bit-identical values."""
        expected = fit(GradientNoiseScale(batch_log_interval=2), max_duration="2ep")
        trained(
            callbacks=GradientNoiseScale(batch_log_interval=2),
            device_train_microbatch_size=2,
            max_duration=stop,
            save_folder=str(tmp_path),
            save_interval=stop,
        )

        found = fit(GradientNoiseScale(batch_log_interval=2), max_duration="2ep", load_path=str(tmp_path / "latest"))

        assert found == {name: values[1:] for name, values in expected.items()}


PROGRAM = """
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.callbacks import GradientNoiseScale
from composer.distributed import get_sampler
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier

torch.manual_seed(0)
data = TensorDataset(torch.randn(19, 4), torch.randint(3, (19,)))
NETWORK = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).state_dict()


def make():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    network.load_state_dict(NETWORK)
    return network


def run(**options):
    model, history = ComposerClassifier(make(), num_classes=3, train_metrics=[]), InMemoryLogger()
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=6, sampler=get_sampler(data, shuffle=False)),
        max_duration="1ep",
        progress_bar=False,
        loggers=history,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        device="cpu",
        device_train_microbatch_size=2,
        callbacks=GradientNoiseScale(batch_log_interval=1, smoothing=0.0),
        **options,
    ) as trainer:
        trainer.fit()
    return torch.tensor([[v for _, v in history.data[f"gradient_noise/{n}"]] for n in ("squared_norm", "trace")])


def square(samples):
    network = make().double()
    loss = nn.functional.cross_entropy(network(data.tensors[0][samples].double()), data.tensors[1][samples])
    return sum(one.square().sum() for one in torch.autograd.grad(loss, list(network.parameters())))


def expected(size):
    found = []
    for first, end in ((0, 12), (12, 19)):  # of the second batch, one process has four samples and the other three
        big = square(list(range(first, end)))
        if size == 2:
            small = (square([first, first + 2]) + square([first + 1, first + 3])) / 2
        else:
            small = square(list(range(first, first + 4)))
        total = end - first
        found.append([(total * big - size * small) / (total - size), (small - big) / (1 / size - 1 / total)])
    return torch.tensor(found).T.float()


torch.testing.assert_close(run(), expected(2), rtol=1e-4, atol=1e-6)
torch.testing.assert_close(run(ddp_sync_strategy="forced_sync"), expected(2), rtol=1e-4, atol=1e-6)
torch.testing.assert_close(run(ddp_sync_strategy="multi_auto_sync"), expected(4), rtol=1e-4, atol=1e-6)
sharded = {"parallelism_config": {"fsdp": {}}}
torch.testing.assert_close(run(ddp_sync_strategy="multi_auto_sync", **sharded), expected(4), rtol=1e-4, atol=1e-6)
try:
    run(**sharded)
except ValueError as error:
    assert "ddp_sync_strategy='multi_auto_sync'" in str(error)
    print("equal")
"""


def test_two_processes(tmp_path):
    """Each process's first microbatch counts; where gradients are reduced after each, they are one microbatch."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    printed = run_processes(program, 2)

    assert [text.split()[-1] for text in printed] == ["equal"] * 2

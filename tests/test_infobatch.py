"""InfoBatch in the Trainer, on handwritten digits: its steps, orders and resumed runs."""

from itertools import groupby
from operator import itemgetter

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback
from composer.algorithms import EMA, InfoBatch, InfoBatchDataset, LabelSmoothing
from composer.models import ComposerClassifier
from fixtures import trained, weights

SIZE, BATCH, EPOCHS = 203, 16, 6


def digits(size=SIZE):
    """Return digits in float64; the first pixel, which is always 0, is the index."""
    images, labels = (torch.from_numpy(array)[:size] for array in load_digits(return_X_y=True))
    images = images / 16
    images[:, 0] = torch.arange(size)
    return images, labels


class WithoutIndex(nn.Module):
    """Returns the pixels."""

    def forward(self, images):
        return images[:, 1:]


class Transposed(nn.Module):
    """Returns scores of tokens as ``(N, C, L)``."""

    def forward(self, scores):
        return scores.movedim(-1, 1)


def make_model():
    torch.manual_seed(0)
    network = nn.Sequential(WithoutIndex(), nn.Linear(63, 16), nn.Tanh(), nn.Linear(16, 10)).double()
    return ComposerClassifier(network, num_classes=10)


class Recorder(Callback):
    """Records the epochs and the indices of the batches."""

    def __init__(self):
        self.batches = []

    @property
    def epochs(self):
        """The batches by epoch."""
        return [[indices for _, indices in group] for _, group in groupby(self.batches, key=itemgetter(0))]

    def batch_start(self, state, logger):
        self.batches.append((int(state.timestamp.epoch), state.batch[0][:, 0].long()))


def fit(*algorithms, size=SIZE, workers=0, callbacks=(), **options):
    """Train on the digits, and return the trainer."""
    data, model = InfoBatchDataset(TensorDataset(*digits(size))), make_model()
    return trained(
        model=model,
        train_dataloader=DataLoader(data, BATCH, sampler=data.sampler, num_workers=workers),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        algorithms=algorithms or [InfoBatch(annealing=0.2)],
        callbacks=callbacks,
        **{"max_duration": f"{EPOCHS}ep", "seed": 3} | options,
    )


@pytest.fixture(scope="module")
def run():
    """The batches of each epoch of a training, and its final weights."""
    recorder = Recorder()
    end = weights(fit(callbacks=[recorder]))
    return recorder.epochs, end


class TestSteps:
    def test_are_those_of_a_plain_loop(self, run):
        """A loop that weighs losses by the paper's formula has the same weights; all high losses are in it."""
        epochs, expected = run
        (images, labels), model = digits(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scores = torch.full((SIZE,), torch.inf)  # the algorithm has none in the first epoch
        for number, epoch in enumerate(epochs):
            is_low, losses_seen = scores < scores.mean(), scores.clone()
            prunes = 0 < number < 5
            assert {*(~is_low).nonzero().flatten().tolist()} <= {*torch.cat(epoch).tolist()}
            for indices in epoch:
                losses = cross_entropy(model.module(images[indices]), labels[indices], reduction="none")
                losses_seen[indices] = losses.detach().float()
                optimizer.zero_grad()
                (losses * torch.where(is_low[indices] & prunes, 2.0, 1.0)).mean().backward()
                optimizer.step()
            scores = losses_seen

        torch.testing.assert_close(weights(model), expected, rtol=1e-12, atol=1e-12)

    def test_microbatches_make_no_difference(self, run):
        """With microbatches of five samples, the weights are equal up to rounding."""
        torch.testing.assert_close(weights(fit(device_train_microbatch_size=5)), run[1], rtol=1e-12, atol=1e-12)

    def test_microbatches_of_labels_that_are_counted(self):
        """Of tokens with ignored labels, also where a microbatch has none, the loss is the mean over the samples."""
        torch.manual_seed(0)
        inputs, labels = torch.randn(16, 6, 4, dtype=torch.float64), torch.randint(3, (16, 6))
        labels[::3, 1:], labels[:8, 3:], labels[12:] = -100, -100, -100
        ends = []
        for size in (None, 4, 3):
            torch.manual_seed(0)
            tokens = nn.Sequential(nn.Linear(4, 3), Transposed()).double()
            model, data = ComposerClassifier(tokens, num_classes=3), InfoBatchDataset(TensorDataset(inputs, labels))
            trained(
                model=model,
                train_dataloader=DataLoader(data, 16, sampler=data.sampler),
                optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
                algorithms=[InfoBatch(annealing=0.0)],
                max_duration="3ep",
                device_train_microbatch_size=size,
                seed=3,
            )
            ends.append(tokens[0].weight.detach())

        assert ends[0].isfinite().all()
        torch.testing.assert_close(ends[1:], 2 * ends[:1], rtol=1e-12, atol=1e-12)

    def test_workers_make_no_difference(self, run):
        """With two workers, the weights are bit-identical."""
        assert torch.equal(weights(fit(workers=2)), run[1])

    @pytest.mark.filterwarnings("ignore:InfoBatch has not acted")  # of the training with all samples
    def test_learns(self):
        """Trained on all digits with fewer steps, the model has nearly the accuracy of a training with all samples."""
        accuracies, steps = [], []
        images, labels = digits(1797)
        for algorithm in (InfoBatch(), InfoBatch(annealing=0.999)):
            trainer = fit(algorithm, size=1500, max_duration="8ep")
            predicted = trainer.state.model.module(images[1500:]).argmax(1)
            accuracies.append((predicted == labels[1500:]).double().mean().item())
            steps.append(int(trainer.state.timestamp.batch))

        assert steps[0] < 0.8 * steps[1]
        assert accuracies[0] > accuracies[1] - 0.02 > 0.86


class TestResume:
    @pytest.mark.parametrize(
        ("stop", "workers"), [("ep0-ba5", 0), ("ep1-ba15", 2), ("ep2-ba30", 0), ("ep4-ba45", 2), ("ep5-ba55", 0)]
    )
    def test_is_exact(self, tmp_path, stop, workers):
        """A run that is stopped within an epoch and resumed is bit-identical, with the same samples in each batch."""
        recorders = [Recorder(), Recorder()]
        options = {"workers": workers, "save_interval": "5ba", "run_name": "run"}
        results = [
            fit(
                InfoBatch(annealing=0.2),
                LabelSmoothing(0.1),
                EMA("4ba"),
                callbacks=recorders[number : number + 1],
                save_folder=str(tmp_path / str(number)),
                load_path=load,
                **options,
            )
            for number, load in enumerate((None, str(tmp_path / "0" / stop)))
        ]

        first, second = ([(epoch, indices.tolist()) for epoch, indices in one.batches] for one in recorders)
        assert second == first[-len(second) :]
        assert torch.equal(*map(weights, results))
        assert int(results[0].state.timestamp.sample) == int(results[1].state.timestamp.sample)

"""Merged checkpoints compared with worked-out sums, with decayed updates, and with a moving average."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer import functional as cf
from composer.algorithms import EMA, SWA, DiLoCo
from composer.checkpoint import CheckpointMismatchError, save_checkpoint
from composer.checkpoint.finding import open_checkpoint
from composer.checkpoint.manifest import MODEL
from composer.core import State
from composer.export import decay_by_merging, merge_checkpoints
from composer.models import ComposerClassifier, ComposerModel


def save_each(folder, values, **options):
    """Return the checkpoints of a layer with these weights, oldest first."""
    paths = []
    for number, value in enumerate(values):
        model = nn.Linear(3, 2, bias=False)
        model.weight.data.copy_(value)
        paths.append(
            save_checkpoint(
                State(model, optimizers=torch.optim.SGD(model.parameters(), 0.1)), folder / str(number), **options
            )
        )
    return paths


@pytest.fixture
def walk():
    """Weights after steps of an optimizer, as it makes them in a stable phase."""
    steps = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0))
    return steps.cumsum(0)


class TestMerge:
    def test_weights_by_formula(self, tmp_path, walk):
        """The mean has the given factors, equal ones by default."""
        paths = save_each(tmp_path, walk)
        factors = [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]

        expected = sum(factor * value.double() for factor, value in zip(factors, walk, strict=True))
        torch.testing.assert_close(merge_checkpoints(paths, factors)["weight"].double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(merge_checkpoints(paths)["weight"], walk.mean(0))

    @pytest.mark.parametrize("schedule", ["1-sqrt", "linear", "cosine", lambda part: 1 - part**2])
    def test_merging_is_a_decay(self, tmp_path, walk, schedule):
        """It equals updates of the same directions, multiplied by the schedule in the middle of each."""
        functions = {
            "1-sqrt": lambda t: 1 - t**0.5,
            "linear": lambda t: 1 - t,
            "cosine": lambda t: (1 + torch.cos(torch.pi * torch.tensor(t)).item()) / 2,
        }
        factor = functions.get(schedule, schedule)
        weights = walk[0].double()
        for step in range(1, len(walk)):
            weights = weights + factor((step - 0.5) / 5) * (walk[step] - walk[step - 1]).double()

        merged = merge_checkpoints(save_each(tmp_path, walk), decay_by_merging(schedule))["weight"]

        torch.testing.assert_close(merged.double(), weights, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(merged, walk[-1])

    def test_equals_a_moving_average(self, tmp_path, walk):
        """With the weights of a moving average it is that average."""
        average, model = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
        average.weight.data.copy_(walk[0])
        for value in walk[1:]:
            model.weight.data.copy_(value)
            cf.compute_ema(model, average, smoothing=0.7)
        factors = [0.7**5, *(0.3 * 0.7 ** (5 - number) for number in range(1, 6))]

        merged = merge_checkpoints(save_each(tmp_path, walk), factors)["weight"]

        torch.testing.assert_close(merged, average.weight.detach())

    def test_half_precision(self, tmp_path):
        """Sums are in 32 bits: 256 checkpoints of 1 in bfloat16 have the mean 1."""
        model = nn.Linear(1, 1, bias=False).bfloat16()
        model.weight.data.fill_(1.0)
        path = save_checkpoint(State(model), tmp_path / "one")

        merged = merge_checkpoints([path] * 256)["weight"]

        assert merged.dtype is torch.bfloat16
        assert merged.item() == 1.0

    def test_what_is_not_trained(self, tmp_path):
        """Frozen weights and buffers, such as the vectors of a spectral norm, are those of the last checkpoint."""
        paths, lasts = [], []
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 3))
            trained = list(model[0].parameters())
            paths.append(save_checkpoint(State(model, optimizers=torch.optim.SGD(trained, 0.1)), tmp_path / str(seed)))
            lasts.append(model.state_dict())
        merged = merge_checkpoints(paths)

        copied = [name for name in merged if torch.equal(merged[name], lasts[1][name])]
        assert sorted(copied) == [
            "0.parametrizations.weight.0._u",
            "0.parametrizations.weight.0._v",
            "1.bias",
            "1.weight",
        ]
        torch.testing.assert_close(merged["0.bias"], (lasts[0]["0.bias"] + lasts[1]["0.bias"]) / 2)

    def test_tied_weights(self, tmp_path):
        """Each name of a weight has the mean, though the optimizer has only the first one."""
        paths, values = [], []
        for number in range(2):
            torch.manual_seed(number)
            model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
            model[1].weight = model[0].weight
            values.append(model[0].weight.detach().clone())
            state = State(model, optimizers=torch.optim.SGD(model.parameters(), 0.1))
            paths.append(save_checkpoint(state, tmp_path / str(number)))

        model.load_state_dict(merge_checkpoints(paths))

        torch.testing.assert_close(model[0].weight.detach(), (values[0] + values[1]) / 2)


class Tied(ComposerModel):
    """A classifier of two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        self.module[1].weight = self.module[0].weight

    def forward(self, batch):
        return self.module(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


class TestAverages:
    def train(self, folder, algorithm, **options):
        """Return the checkpoints of a training with an algorithm, the last one of which is not its last batch."""
        torch.manual_seed(0)
        model, inputs = Tied(), torch.randn(64, 4)
        Trainer(
            model=model,
            train_dataloader=DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=8),
            algorithms=algorithm,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
            max_duration="8ba",
            save_folder=folder,
            save_filename="ba{batch}",
            save_interval="1ba",
            progress_bar=False,
            **options,
        ).fit()
        return [folder / f"ba{batch}" for batch in (4, 5, 6)]

    def test_outer_steps(self, tmp_path):
        """With DiLoCo the merged weights are those after the last outer step, as of files of weights."""
        merged = merge_checkpoints(self.train(tmp_path / "all", DiLoCo(sync_every="3ba")), [0.5, 0.3, 0.2])

        paths = self.train(tmp_path / "weights", DiLoCo(sync_every="3ba"), save_weights_only=True)
        torch.testing.assert_close(merged, merge_checkpoints(paths, [0.5, 0.3, 0.2]))
        assert torch.equal(merged["module.0.weight"], merged["module.1.weight"])

    @pytest.mark.parametrize(
        "algorithm", [partial(EMA, half_life="2ba"), partial(SWA, swa_start="2ba", update_interval="1ba")]
    )
    def test_averages(self, tmp_path, algorithm):
        """With EMA and SWA they are those of the training; files of weights have the averages."""
        merged = merge_checkpoints(self.train(tmp_path / "averaged", algorithm()))

        torch.testing.assert_close(merged, merge_checkpoints(self.train(tmp_path / "alone", None)))
        averages = merge_checkpoints(self.train(tmp_path / "weights", algorithm(), save_weights_only=True))
        assert not torch.allclose(merged["module.0.weight"], averages["module.0.weight"])


class TestStatistics:
    def train(self, folder):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        inputs = torch.randn(64, 4)
        loader = DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=16)
        model = ComposerClassifier(network, num_classes=2)
        Trainer(
            model=model,
            train_dataloader=loader,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
            max_duration="3ep",
            save_folder=folder,
            save_interval="1ep",
            progress_bar=False,
        ).fit()
        return model, loader, sorted(path for path in folder.iterdir() if path.name.startswith("ep"))

    def test_rejected_or_computed_again(self, tmp_path):
        """Running statistics raise an error, or are those of the last checkpoint until they are computed."""
        model, loader, paths = self.train(tmp_path)
        with pytest.raises(
            ValueError, match=r"running statistics of batch normalization, such as 'module.1.running_mean'"
        ):
            merge_checkpoints(paths)

        merged = merge_checkpoints(paths, statistics="last")

        last = open_checkpoint(paths[-1]).tensors(MODEL)
        assert torch.equal(merged["module.1.running_mean"], last["module.1.running_mean"])
        assert not torch.equal(merged["module.0.weight"], last["module.0.weight"])
        model.load_state_dict(merged)
        torch.optim.swa_utils.update_bn((inputs for inputs, _ in loader), model)
        hidden = torch.cat([model.module[0](inputs) for inputs, _ in loader])
        torch.testing.assert_close(model.module[1].running_mean, hidden.mean(0).detach())


class TestErrors:
    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ([1.0], "must be 2 factors whose sum is 1"),
            ([0.7, 0.7], "must be 2 factors whose sum is 1"),
            (lambda count: [1.0], "must be 2"),
        ],
    )
    def test_factors(self, tmp_path, walk, weights, message):
        """There is a factor for each checkpoint, and their sum is 1."""
        with pytest.raises(ValueError, match=message):
            merge_checkpoints(save_each(tmp_path, walk[:2]), weights)

    def test_no_paths(self):
        """A mean of nothing is an error."""
        with pytest.raises(ValueError, match="paths must name at least one checkpoint, got none"):
            merge_checkpoints([])

    @pytest.mark.parametrize("paths", ["runs/ep1", Path("runs/ep1")])
    def test_one_path(self, paths):
        """A path is not a list of them."""
        with pytest.raises(TypeError, match=r"paths must be a list of checkpoints, got .*runs/ep1"):
            merge_checkpoints(paths)

    def test_one_checkpoint_has_no_decay(self, tmp_path, walk):
        """A decay is between checkpoints."""
        with pytest.raises(ValueError, match="at least 2 checkpoints, got 1"):
            merge_checkpoints(save_each(tmp_path, walk[:1]), decay_by_merging())

    def test_schedule(self):
        """An unknown name is an error with the known ones."""
        with pytest.raises(ValueError, match="schedule must be one of"):
            decay_by_merging("sqrt")

    def test_other_model(self, tmp_path, walk):
        """The error names the file and the tensor."""
        other = save_checkpoint(State(nn.Linear(3, 3, bias=False)), tmp_path / "other")
        with pytest.raises(CheckpointMismatchError, match=r"its weights are not those of .*'weight' differs"):
            merge_checkpoints([other, *save_each(tmp_path, walk[:1])])
        deeper = save_checkpoint(State(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), tmp_path / "deeper")
        with pytest.raises(CheckpointMismatchError, match="DepthStacking may have added some"):
            merge_checkpoints([deeper, *save_each(tmp_path / "one", walk[:1])])

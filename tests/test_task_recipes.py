"""The examples for tables, time series, fine-tuning, rare classes, several labels and a GAN."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from composer import Trainer
from composer.models import ComposerClassifier

pytest.importorskip("sklearn", reason="it has the data of the examples")
pytest.importorskip("matplotlib", reason="it has the series of an example")

from sklearn.metrics import f1_score

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import class_imbalance
import fine_tuning
import gan
import multi_label
import tabular
import time_series


class TestTabular:
    def test_best_checkpoint_has_the_best_value(self, tmp_path):
        """The loaded checkpoint has the value that early stopping saw, and predictions have the targets' order."""
        table = tabular.read_table()
        parts, sizes = tabular.split_table(table, "progression", ["sex"])

        result = tabular.run(parts, sizes, "4ep", str(tmp_path))

        assert result["reloaded"] == pytest.approx(result["best"], rel=1e-6)
        assert result["targets"].tolist() == table["progression"][parts[2].indices].tolist()
        assert result["predictions"].shape == tabular.predict_linearly(parts, sizes).shape == (88,)
        assert (result["predictions"] - result["targets"]).abs().mean() < 65  # the mean of the targets has 69

    def test_file_with_text(self, tmp_path):
        """Columns of a file are found by name, and a category that is not in the training data has the id 0."""
        path = tmp_path / "table.csv"
        path.write_text("price,city,size\n" + "".join(f"{row},{'ab'[row % 2]},{row / 2}\n" for row in range(10)))
        table = tabular.read_table(str(path))
        train, _, test = tabular.split_table(table, "price", ["city"])[0]
        table["city"][test.indices[0]] = "new"

        parts, sizes = tabular.split_table(table, "price", ["city"])

        (numbers, ids), target = parts[2][0]
        row = test.indices[0]
        assert (numbers.tolist(), ids.tolist(), target.item()) == ([row / 2], [0], row)
        assert sizes == [3]
        assert {ids.item() for (_, ids), _ in parts[0]} == {1, 2}
        assert len(train) == 6


class TestTimeSeries:
    def test_parts_have_no_step_in_common(self):
        """Windows contain successive steps of one part, and the statistics are those of the first part."""
        series = torch.stack([torch.arange(100.0), 50 - 2 * torch.arange(100.0)], dim=1)

        parts, scaler = time_series.make_windows(series, length=5, horizon=2)

        assert [len(part) for part in parts] == [54, 14, 14]
        assert scaler.mean.tolist() == [29.5, -9.0]
        channels = [scaler.restore(torch.cat(part[:], dim=2))[:, 0] for part in parts]
        steps = [set(channel.flatten().round().int().tolist()) for channel in channels]
        assert steps == [set(range(60)), set(range(60, 80)), set(range(80, 100))]
        inputs, targets = (scaler.restore(values) for values in parts[1][3:4])
        assert inputs[0, 0].round().tolist() == [63, 64, 65, 66, 67]
        assert targets[0, 1].round().tolist() == [50 - 2 * 68, 50 - 2 * 69]

    def test_errors(self, tmp_path):
        """The errors of a file's series are in its units, and the network is better than the last value."""
        angles = np.arange(400) / 3
        path = tmp_path / "series.csv"
        np.savetxt(path, np.stack([7 + 3 * np.sin(angles), np.cos(angles)], axis=1), delimiter=",", header="a,b")

        errors = time_series.run(time_series.read_series(str(path)), length=8, horizon=2, duration="8ep")

        test = 7 + 3 * np.sin(angles[320:])
        changes = [np.abs(test[8 + step : len(test) - 1 + step] - test[7:-2]).mean() for step in range(2)]
        assert errors["last value"][0].item() == pytest.approx(np.mean(changes), rel=1e-4)
        assert (errors["network"] < 0.5 * errors["last value"]).all()

    def test_sample(self):
        """The sample has four channels."""
        assert time_series.read_series().shape == (800, 4)


class TestFineTuning:
    @pytest.fixture
    def data(self):
        return fine_tuning.load_data(range(5, 10), count=2)

    def make_trainer(self, model, data, **settings):
        return Trainer(
            model=model,
            train_dataloader=torch.utils.data.DataLoader(data[0], batch_size=2, shuffle=True),
            optimizers=torch.optim.AdamW(fine_tuning.cf.parameter_groups(model, weight_decay=0.01)),
            callbacks=[fine_tuning.GradualUnfreezing()],
            seed=0,
            device="cpu",
            progress_bar=False,
            **settings,
        )

    def make_model(self):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(576, 5))
        return ComposerClassifier(network, num_classes=5)

    def test_one_more_part_in_each_epoch(self, data):
        """Weights of a part change from its epoch on, and not before."""
        model, changed = self.make_model(), []
        trainer = self.make_trainer(model, data, max_duration="3ep")
        for _ in range(3):
            before = {name: value.clone() for name, value in model.module.named_parameters()}
            trainer.fit(duration="1ep")
            parameters = model.module.named_parameters()
            changed.append({name[0] for name, value in parameters if not value.equal(before[name])})

        assert changed == [{"4"}, {"2", "4"}, {"0", "2", "4"}]

    def test_resumed_training_is_identical(self, data, tmp_path):
        """A training that is resumed within an epoch has the weights of an uninterrupted one, bit for bit."""
        uninterrupted, first, second = (self.make_model() for _ in range(3))
        self.make_trainer(uninterrupted, data, max_duration="3ep").fit()
        options = {"save_folder": str(tmp_path), "save_interval": "1ba", "run_name": "run", "autoresume": True}
        with self.make_trainer(first, data, max_duration="3ep", **options) as trainer:
            trainer.fit(duration="7ba")

        with self.make_trainer(second, data, max_duration="3ep", **options) as trainer:
            assert trainer.state.timestamp.batch == 7
            trainer.fit()

        assert trainer.state.timestamp.batch == 15
        pairs = zip(uninterrupted.parameters(), second.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)

    def test_rates_grow_with_depth(self):
        """The stem has the smallest rate, and the new head the rate that is given."""
        model = fine_tuning.composer_torchvision("resnet18", num_classes=5)
        groups = fine_tuning.cf.parameter_groups(model, lr=0.1, weight_decay=0.0, layer_decay=0.7)

        rates = {id(one): group["lr"] for group in groups for one in group["params"]}
        named = [rates[id(one)] for one in model.parameters()]
        assert named == sorted(named)
        assert rates[id(model.module.conv1.weight)] == pytest.approx(0.1 * 0.7**9)
        assert rates[id(model.module.fc.weight)] == 0.1

    def test_pretrained_weights_are_used(self, data):
        """A new head is the only difference to the network, which itself does not change."""
        network = fine_tuning.composer_torchvision("resnet18", num_classes=7).module
        before = {name: value.clone() for name, value in network.state_dict().items()}

        model = fine_tuning.with_new_head(network)
        accuracy = fine_tuning.train(model, data, torch.optim.SGD(model.parameters(), lr=0.0), "1ep")

        assert 0 <= accuracy <= 1
        assert all(value.equal(before[name]) for name, value in network.state_dict().items())
        assert model.module.conv1.weight.equal(network.conv1.weight)
        assert model.module.fc.weight.shape == (5, 512)


class TestClassImbalance:
    def test_one_class_is_rare(self):
        """In the training data a class is rarer than in the data to evaluate with."""
        train, test = class_imbalance.load_data()

        assert train.tensors[1].float().mean() == pytest.approx(0.02, abs=0.001)
        assert test.tensors[1].float().mean() == pytest.approx(0.1, abs=0.01)

    def test_weights_find_more_of_the_rare_class(self):
        """Class weights and the sampler have a higher balanced accuracy than the plain loss, whose accuracy is high."""
        results = class_imbalance.compare("10ep")

        balanced = {name: metrics["balanced accuracy"] for name, metrics in results.items()}
        assert set(balanced) == {"logistic regression", "plain", "class weights", "sampler", "focal loss"}
        assert results["plain"]["accuracy"] > 0.9
        assert min(balanced["class weights"], balanced["sampler"]) > balanced["plain"] + 0.05


class TestMultiLabel:
    def test_labels_are_the_digits_of_a_strip(self):
        """Cells and labels fit, and the parts have no digit's image in common."""
        images, digits = torch.arange(1.0, 11).view(10, 1, 1).expand(10, 8, 8), torch.arange(10)

        strips = multi_label.make_strips(images, digits, 50, torch.Generator().manual_seed(0))

        for image, labels in zip(*strips.tensors, strict=True):
            assert image.shape == (1, 8, 24)
            cells = {int(cell.mean()) - 1 for cell in image[0].split(8, dim=1)} - {-1}
            assert cells == set(labels.nonzero().flatten().tolist())

    def test_thresholds_are_the_best(self):
        """No other candidate has a higher F1 score of its label."""
        generator = torch.Generator().manual_seed(0)
        labels = (torch.rand(200, multi_label.NUM_LABELS, generator=generator) < 0.2).long()
        probabilities = (0.3 * labels + 0.7 * torch.rand(labels.shape, generator=generator)).double()

        found = multi_label.best_thresholds(probabilities, labels)

        for label in range(multi_label.NUM_LABELS):
            scores = [
                f1_score(labels[:, label], probabilities[:, label] > threshold, zero_division=0)
                for threshold in torch.linspace(0.05, 0.95, 19)
            ]
            chosen = f1_score(labels[:, label], probabilities[:, label] > found[label])
            assert chosen == pytest.approx(max(scores))

    def test_network_is_better_than_the_baseline(self):
        """The network has clearly higher F1 scores than the logistic regression."""
        scores = multi_label.run("15ep")

        assert scores["network"] > scores["logistic regression"] + 0.05
        assert scores["network, tuned thresholds"] > scores["logistic regression"] + 0.05


class TestGAN:
    def test_frechet_distance(self):
        """It is that of scipy's matrix square root, and 0 for the same images."""
        scipy_linalg = pytest.importorskip("scipy.linalg", reason="the reference")
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(200, 5, generator=generator, dtype=torch.float64)
        others = 0.5 * images @ torch.rand(5, 5, generator=generator, dtype=torch.float64) + 1

        (a, b), mean = (np.cov(part.numpy().T) for part in (images, others)), (images - others).mean(0)
        expected = mean.square().sum().item() + np.trace(a + b - 2 * scipy_linalg.sqrtm(a @ b).real)

        assert gan.frechet_distance(images, others) == pytest.approx(expected)
        assert gan.frechet_distance(images, images) == pytest.approx(0, abs=1e-9)

    def test_losses_of_one_network_reach_no_other(self):
        """Each loss has gradients for the weights of its own network only."""
        torch.manual_seed(0)
        model = gan.GAN()
        batch = torch.rand(4, 64), torch.arange(4)
        networks = {"generator": model.generator, "discriminator": model.discriminator}

        losses = model.loss(model(batch), batch)

        for name, loss in losses.items():
            for other, network in networks.items():
                found = torch.autograd.grad(loss, [*network.parameters()], retain_graph=True, allow_unused=True)
                assert [gradient is not None for gradient in found] == [name == other] * len(found)

    def test_digits_are_recognized(self):
        """After half the training a classifier recognizes most of the drawn digits, and their pixels are closer."""
        measures, images = gan.run("70ep")

        before, after, real = measures.values()
        assert images.shape == (597, 64)
        assert before["recognized"] < 0.2 < 0.6 < after["recognized"]
        assert real["distance"] < after["distance"] < 0.5 * before["distance"]

"""The programs of ``examples/tasks`` train, and their numbers are those of another implementation.

Each program has a function ``main`` that returns what it has computed, and here a function ``check_NAME`` that computes
the metrics again from the predictions. The table of the tasks, ``docs/guides/tasks.md``, links each program.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from check_size import code_lines

pytest.importorskip("sklearn", reason="it has the data of the programs")

from sklearn import metrics as sk

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted((ROOT / "examples/tasks").glob("*.py"))


def run(path):
    """Import a program and return the result of its ``main``."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
class TestEachProgram:
    def test_numbers(self, path, tmp_path, monkeypatch):
        """The program runs in an empty folder, and the metrics it returns follow from its predictions."""
        monkeypatch.chdir(tmp_path)

        globals()[f"check_{path.stem}"](run(path))

    def test_length(self, path):
        """The program has at most 30 lines of code."""
        assert len(code_lines(path.read_text())) <= 30

    def test_prints_no_tensors(self, path):
        """As a program, it prints metrics and not all that the test compares."""
        assert "print(main())" not in path.read_text()

    def test_is_in_the_table(self, path):
        """The page of the tasks links the program."""
        assert f"(../../examples/tasks/{path.name})" in (ROOT / "docs/guides/tasks.md").read_text()


def parts_of(result, *names):
    """Return parts of a result as NumPy's arrays, and the metrics as numbers."""
    metrics = {name: value.item() for name, value in result["metrics"].items()}
    return *(result[name].numpy() for name in names), metrics


def check_one_label(result):
    """Accuracy and cross entropy are those of scikit-learn and NumPy, and most digits are recognized."""
    probabilities, targets, metrics = parts_of(result, "probabilities", "targets")

    accuracy = sk.accuracy_score(targets, probabilities.argmax(1))
    assert accuracy > 0.9
    assert metrics["MulticlassAccuracy"] == pytest.approx(accuracy)
    assert metrics["CrossEntropy"] == pytest.approx(-np.log(probabilities[range(len(targets)), targets]).mean(), 1e-4)


def check_several_labels(result):
    """Accuracy and F1 scores are those of scikit-learn, at the thresholds 0.5 and at the tuned ones."""
    scores, predicted, targets, metrics = parts_of(result, "scores", "predicted", "targets")

    assert metrics["MultilabelAccuracy"] == pytest.approx((targets == (scores > 0)).mean())
    assert metrics["MultilabelF1Score"] == pytest.approx(sk.f1_score(targets, scores > 0, average="macro"))
    assert metrics["tuned"] == pytest.approx(sk.f1_score(targets, predicted, average="macro"))
    assert min(metrics.values()) > 0.85
    assert (predicted != (scores > 0)).any()


def check_ordinal(result):
    """Probabilities add up to 1, and Cohen's kappa with quadratic weights is that of scikit-learn."""
    probabilities, targets, metrics = parts_of(result, "probabilities", "targets")

    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-4)
    kappa = sk.cohen_kappa_score(targets, probabilities.argmax(1), weights="quadratic")
    assert metrics["MulticlassCohenKappa"] == pytest.approx(kappa, rel=1e-5)
    assert kappa > 0.5


def check_rare_class(result):
    """Class weights and the sampler find the rare class, by metrics that are scikit-learn's."""
    balanced = {}
    for name, one in result.items():
        scores, targets, metrics = parts_of(one, "scores", "targets")
        balanced[name] = sk.balanced_accuracy_score(targets, scores > 0)
        assert metrics["balanced accuracy"] == pytest.approx(balanced[name])
        assert metrics["precision"] == pytest.approx(sk.average_precision_score(targets, scores), rel=1e-5)

    assert balanced["plain"] < 0.7 < 0.85 < min(balanced["weights"], balanced["sampler"])


def check_regression(result):
    """The mean absolute error and R2 are those of scikit-learn."""
    predictions, targets, metrics = parts_of(result, "predictions", "targets")

    assert metrics["MeanAbsoluteError"] == pytest.approx(sk.mean_absolute_error(targets, predictions))
    assert metrics["R2Score"] == pytest.approx(sk.r2_score(targets, predictions), rel=1e-4)
    assert metrics["R2Score"] > 0.4


def check_several_heads(result):
    """Each head has the metrics of its targets by scikit-learn, and the total is the sum of the weighted losses."""
    metrics = {}
    for name, predictions in result["predictions"].items():
        targets = result["targets"][name]
        metrics[f"{name}/MAE"] = sk.mean_absolute_error(targets, predictions)
        metrics[f"{name}/R2"] = sk.r2_score(targets, predictions)

    assert {name: value.item() for name, value in result["metrics"].items()} == pytest.approx(metrics, rel=1e-4)
    assert len(metrics) == 6
    assert metrics["ldl/R2"] > 0.9
    logged = {name.removeprefix("loss/train/"): float(value) for name, value in result["logged"].items()}
    total = logged.pop("total")
    assert sorted(logged) == ["glucose", "ldl", "progression"]
    assert total == pytest.approx(sum(logged.values()), rel=1e-5)


def check_segmentation(result):
    """The overlaps are scikit-learn's scores of the pixels that are not ignored."""
    masks, targets, metrics = parts_of(result, "masks", "targets")

    pixels = targets[targets >= 0], masks[targets >= 0]
    assert metrics["MIoU"] == pytest.approx(100 * sk.jaccard_score(*pixels, average="macro"), rel=1e-5)
    assert metrics["Dice"] == pytest.approx(sk.f1_score(*pixels, average="macro"), rel=1e-5)
    assert metrics["Dice"] > 0.85
    assert (targets < 0).mean() == 0.25


def check_binary_segmentation(result):
    """The overlaps are scikit-learn's scores of the pixels that are not ignored, with both losses."""
    for one in result.values():
        masks, targets, metrics = parts_of(one, "masks", "targets")
        pixels = targets[targets >= 0], masks[targets >= 0]
        assert metrics["BinaryJaccardIndex"] == pytest.approx(sk.jaccard_score(*pixels), rel=1e-5)
        assert metrics["Dice"] == pytest.approx(sk.f1_score(*pixels, average="macro"), rel=1e-5)
        assert metrics["BinaryJaccardIndex"] > 0.75

    assert (result["Dice"]["masks"] != result["cross entropy"]["masks"]).any()


def check_detection(result):
    """The average precision is that of the definition, in NumPy, and each image has its own boxes."""
    found, targets = result["found"], result["targets"]

    assert len(found) == len(targets) == 16
    assert [len(target["boxes"]) for target in targets[:4]] == [0, 1, 2, 0]
    expected = average_precision(found, targets, 0.5)
    assert result["metrics"]["MAP/map_50"].item() == pytest.approx(expected, abs=1e-6)
    assert expected > 0.1


def average_precision(found, targets, least):
    """Return the mean of the precisions at 101 recalls (arXiv:1405.0312) for one class and an overlap of ``least``."""
    guesses = [
        (score, place, box)
        for place, one in enumerate(found)
        for score, box in sorted(zip(one["scores"].tolist(), one["boxes"].tolist(), strict=True), reverse=True)[:100]
    ]
    free = [target["boxes"].tolist() for target in targets]
    count, hits = sum(map(len, free)), []
    for _, place, box in sorted(guesses, key=lambda guess: -guess[0]):
        overlaps = [overlap(box, other) for other in free[place]]
        hits.append(bool(overlaps) and max(overlaps) >= least)
        if hits[-1]:
            free[place].pop(int(np.argmax(overlaps)))
    right = np.cumsum(hits)
    precision = np.maximum.accumulate((right / np.arange(1, len(hits) + 1))[::-1])[::-1]
    recalls = torch.linspace(0, 1, 101).double().numpy()  # as torchmetrics rounds them
    places = np.searchsorted(right / count, recalls)
    return np.append(precision, 0)[np.minimum(places, len(hits))].mean()


def overlap(box, other):
    """Return the intersection over the union of two boxes."""
    (left, top, right, bottom), (x1, y1, x2, y2) = box, other
    common = max(0, min(right, x2) - max(left, x1)) * max(0, min(bottom, y2) - max(top, y1))
    return common / ((right - left) * (bottom - top) + (x2 - x1) * (y2 - y1) - common)


def check_sequences(result):
    """Accuracy and cross entropy are those of scikit-learn and torch, and most lines are recognized."""
    accuracy = sk.accuracy_score(result["targets"], result["scores"].argmax(dim=1))

    assert result["metrics"]["MulticlassAccuracy"].item() == pytest.approx(accuracy)
    cross_entropy = functional.cross_entropy(result["scores"].double(), result["targets"])
    assert result["metrics"]["CrossEntropy"].item() == pytest.approx(cross_entropy.item(), rel=1e-4)
    assert accuracy > 0.7


def check_time_series(result):
    """The errors are those of NumPy, and not much larger than the noise."""
    predictions, targets, metrics = parts_of(result, "predictions", "targets")

    assert predictions.shape == targets.shape == (273, 4)
    assert metrics["MeanAbsoluteError"] == pytest.approx(np.abs(predictions - targets).mean(), rel=1e-5)
    assert metrics["MeanSquaredError"] == pytest.approx(np.square(predictions - targets).mean(), rel=1e-5)
    assert metrics["MeanAbsoluteError"] < 0.15  # that of the noise has 0.08


def check_table(result):
    """The errors are those of scikit-learn, and smaller than those of the mean."""
    predictions, targets, metrics = parts_of(result, "predictions", "targets")

    assert metrics["MeanAbsoluteError"] == pytest.approx(sk.mean_absolute_error(targets, predictions), rel=1e-5)
    assert metrics["MeanSquaredError"] == pytest.approx(sk.mean_squared_error(targets, predictions), rel=1e-5)
    assert metrics["MeanSquaredError"] < 0.7 * targets.var()


def check_k_fold(result):
    """Each row has a prediction, and the errors of the folds, weighted by rows, are the error of all rows."""
    predictions, targets = result["predictions"], result["targets"]

    assert len(result["metrics"]) == 5
    sizes = [89, 89, 88, 88, 88]
    errors = [one["MeanSquaredError"].item() for one in result["metrics"]]
    expected = sk.mean_squared_error(targets, predictions)  # an error for NaN
    assert np.average(errors, weights=sizes) == pytest.approx(expected, rel=1e-5)
    assert expected < 0.7


def check_contrastive(result):
    """With labels of 50 images, the nearest of these has the class of more test images by what was learned."""
    from sklearn.neighbors import KNeighborsClassifier

    labels, scores = result["labels"].numpy(), {}
    for name in ("before", "after"):
        points = result[name].numpy() / np.linalg.norm(result[name].numpy(), axis=1, keepdims=True)
        nearest = KNeighborsClassifier(1).fit(points[:50], labels[:50])
        scores[name] = nearest.score(points[1200:], labels[1200:])
    assert scores["after"] > scores["before"] + 0.05


def check_variational_autoencoder(result):
    """Both parts of the loss are those of their definitions, the loss is their sum, and the best one is kept."""
    scores, mean, log_variance = (output.numpy().astype(float) for output in result["outputs"])
    images, found = result["images"].numpy(), {name: value.item() for name, value in result["metrics"].items()}

    pixels = np.logaddexp(0, scores) - images * scores
    kl = (mean**2 + np.exp(log_variance) - 1 - log_variance) / 2
    assert found["loss/pixels"] == pytest.approx(pixels.sum(1).mean(), rel=1e-4)
    assert found["loss/kl"] == pytest.approx(kl.sum(1).mean(), rel=1e-4)
    assert found["loss"] == pytest.approx(found["loss/pixels"] + found["loss/kl"])
    assert {"loss/train/pixels", "loss/train/kl", "metrics/eval/loss"} <= result["result"].metrics.keys()
    assert Path("checkpoints/best").exists()
    assert pixels.sum(1).mean() < 25  # half of the entropy of the pixels' mean


def frechet_distance(images, others):
    """The squared distance of the normal distributions with the means and covariances of two sets."""
    a, b = np.cov(images.T), np.cov(others.T)
    root = np.sqrt(np.maximum(np.linalg.eigvals(a @ b).real, 0)).sum()
    return np.square(images.mean(0) - others.mean(0)).sum() + np.trace(a + b) - 2 * root


def check_diffusion(result):
    """The errors of the found noise are NumPy's, and drawn images are nearer to digits than what they begin with."""
    from sklearn.datasets import load_digits

    found, noise, drawn = (result[name].numpy().astype(float) for name in ("found", "noise", "drawn"))

    metrics, digits = result["metrics"], load_digits().data / 8 - 1
    assert metrics["MeanSquaredError"].item() == pytest.approx(np.square(found - noise).mean(), rel=1e-4)
    assert metrics["MeanAbsoluteError"].item() == pytest.approx(np.abs(found - noise).mean(), rel=1e-4)
    assert frechet_distance(drawn, digits) < 10 < 40 < frechet_distance(noise, digits)


def check_gan(result):
    """A classifier of real digits recognizes many drawn ones, and both losses are logged."""
    from sklearn.linear_model import LogisticRegression

    images, digits = (part.numpy() for part in result["data"].tensors)
    classifier = LogisticRegression(max_iter=2000).fit(images, digits)
    assert classifier.score(result["before"], digits) < 0.2
    assert classifier.score(result["after"], digits) > 0.4
    losses = [result["losses"][f"loss/train/{name}"] for name in ("discriminator", "generator")]
    assert result["losses"]["loss/train/total"] == pytest.approx(sum(losses), rel=1e-5)


def check_fine_tuning(result):
    """Accuracies of the averages and of the weights are scikit-learn's; rates, norms and groups are as requested."""
    state, targets = result["state"], result["targets"]
    (inputs, labels), (frozen, other) = result["test"], [state.model.module[place][1] for place in (0, 1)]

    of_averages = sk.accuracy_score(targets, result["scores"].argmax(dim=1))
    of_weights = sk.accuracy_score(labels, state.model.module.eval()(inputs).argmax(dim=1))
    assert result["metrics"]["ema"]["MulticlassAccuracy"].item() == pytest.approx(of_averages)
    assert result["metrics"]["raw"]["MulticlassAccuracy"].item() == pytest.approx(of_weights)
    assert of_averages != of_weights
    assert min(of_averages, of_weights) > 0.6
    assert sorted(group["lr"] for group in state.optimizers[0].param_groups) == [3.75e-4, 7.5e-4, 1.5e-3, 3e-3]
    # 18 batches in 5 epochs before; later 2 in each epoch, of which the first 6 train the head and the last block.
    assert (frozen.num_batches_tracked, other.num_batches_tracked) == (90, 90 + 14 * 2)

"""The programs of ``examples/tasks`` train, and their numbers are those of another implementation.

Each program has a function ``main`` that returns what it has computed, and here a function ``check_NAME`` that computes
the metrics again from the predictions. The table of the tasks, ``docs/guides/tasks.md``, links each program.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from check_size import code_lines

pytest.importorskip("sklearn", reason="it has the data of the programs")

from sklearn import metrics as sklearn_metrics

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

    def test_is_in_the_table(self, path):
        """The page of the tasks links the program."""
        assert f"(../../examples/tasks/{path.name})" in (ROOT / "docs/guides/tasks.md").read_text()


def check_one_label(result):
    """Accuracy and cross entropy are those of scikit-learn, and most digits are recognized."""
    probabilities, targets, found = result["probabilities"], result["targets"], result["metrics"]

    accuracy = sklearn_metrics.accuracy_score(targets, probabilities.argmax(dim=1))
    assert accuracy > 0.9
    assert found["MulticlassAccuracy"].item() == pytest.approx(accuracy)
    of_targets = probabilities.numpy()[range(len(targets)), targets.numpy()]
    assert found["CrossEntropy"].item() == pytest.approx(-np.log(of_targets).mean(), rel=1e-4)


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

    of_averages = sklearn_metrics.accuracy_score(targets, result["scores"].argmax(dim=1))
    of_weights = sklearn_metrics.accuracy_score(labels, state.model.module.eval()(inputs).argmax(dim=1))
    assert result["metrics"]["ema"]["MulticlassAccuracy"].item() == pytest.approx(of_averages)
    assert result["metrics"]["raw"]["MulticlassAccuracy"].item() == pytest.approx(of_weights)
    assert of_averages != of_weights
    assert min(of_averages, of_weights) > 0.6
    assert sorted(group["lr"] for group in state.optimizers[0].param_groups) == [3.75e-4, 7.5e-4, 1.5e-3, 3e-3]
    # 18 batches in 5 epochs before; later 2 in each epoch, of which the first 6 train the head and the last block.
    assert (frozen.num_batches_tracked, other.num_batches_tracked) == (90, 90 + 14 * 2)

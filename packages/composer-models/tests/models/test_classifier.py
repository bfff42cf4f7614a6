"""Tests of composer.models.ComposerClassifier."""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryAveragePrecision,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassF1Score,
    MultilabelAccuracy,
    MultilabelF1Score,
)
from torchmetrics.wrappers import ClasswiseWrapper

from composer import functional as cf
from composer.loss import DiceLoss, binary_cross_entropy_with_logits
from composer.metrics import CrossEntropy, LossMetric
from composer.models import ComposerClassifier


def _classifier(**settings):
    return ComposerClassifier(nn.Linear(4, 3), **settings)


def _seen(model, metric, outputs, target):
    """Update a metric with one batch and return its value."""
    model.update_metric((None, target), outputs, metric)
    return metric.compute().item()


class TestForwardAndLoss:
    @pytest.mark.parametrize("pair", [tuple, list])
    def test_forward_is_the_module_on_the_input(self, pair):
        """The target is not used in the forward pass."""
        model, images = _classifier(), torch.rand(5, 4)

        outputs = model(pair([images, None]))

        assert torch.equal(outputs, model.module(images))

    def test_loss_of_class_ids(self):
        """By default the loss is the mean of -log softmax at the target."""
        outputs, target = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])

        loss = _classifier().loss(outputs, (None, target))

        torch.testing.assert_close(loss, -outputs.log_softmax(1)[range(5), target].mean())

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
    @pytest.mark.parametrize("shape", [(5, 3), (5,)])
    def test_a_label_for_each_score(self, dtype, shape):
        """Labels of 0 and 1 in the shape of the scores fit a binary cross entropy, and integers also the metrics."""
        model = _classifier(loss_fn=nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)))
        outputs, labels = torch.randn(shape), torch.randint(2, shape)

        loss = model.loss(outputs, (None, labels.to(dtype)))

        weights = 1.0 + labels
        torch.testing.assert_close(loss, -(weights * (outputs * (2 * labels - 1)).sigmoid().log()).mean())

    def test_class_weights_are_settings(self):
        """The weights of a loss of torch are those of the program, and not saved; parameters of a custom loss are."""
        weights = torch.tensor([1.0, 5.0, 20.0])
        own = nn.Module()
        own.margin, own.loss = nn.Parameter(torch.ones(3)), nn.CrossEntropyLoss(weight=weights)

        given = _classifier(loss_fn=nn.CrossEntropyLoss(weight=weights), val_metrics=LossMetric(own.loss))
        model = _classifier(loss_fn=own, train_metrics=[], val_metrics=[])

        assert not [name for name in given.state_dict() if "loss" in name]
        assert [name for name in model.state_dict() if "loss" in name] == ["loss_fn.margin"]
        assert torch.equal(given.double().loss_fn.weight, weights.double())

    def test_probabilities_of_16_bits(self):
        """Metrics of torchmetrics get probabilities in float32, which do not become equal near 1."""
        logits, targets = torch.tensor([7.0, 8.0, 9.0, 10.0]).bfloat16(), torch.tensor([0, 0, 1, 1])
        model = _classifier(num_classes=2, val_metrics=BinaryAUROC())
        metric = model.get_metrics()["BinaryAUROC"]

        model.update_metric((None, targets), logits, metric)

        assert metric.compute() == 1.0

    def test_a_label_for_each_score_is_not_for_a_cross_entropy(self):
        """Several labels of a sample are no probabilities that sum to 1, so a cross entropy still raises an error."""
        model = _classifier(loss_fn=nn.CrossEntropyLoss())

        with pytest.raises(RuntimeError, match="Long"):
            model.loss(torch.randn(5, 3), (None, torch.randint(2, (5, 3))))

    @pytest.mark.parametrize("given", [nn.functional.cross_entropy, nn.CrossEntropyLoss(weight=torch.rand(3))])
    @pytest.mark.parametrize("is_set_later", [False, True])
    def test_former_name_of_the_loss(self, given, is_set_later):
        """A subclass may use and set the loss as ``_loss_fn``, as with MosaicML Composer."""

        class Doubled(ComposerClassifier):
            def __init__(self, loss_fn):
                super().__init__(nn.Linear(4, 3), **({} if is_set_later else {"loss_fn": loss_fn}))
                if is_set_later:
                    self._loss_fn = loss_fn

            def loss(self, outputs, batch, *args, **kwargs):
                return 2 * self._loss_fn(outputs, batch[1], *args, **kwargs)

        model, outputs, target = Doubled(given), torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])

        assert model.loss(outputs, (None, target)) == 2 * given(outputs, target)
        assert model.loss_fn is model._loss_fn is given
        assert not any(name.startswith("_loss_fn") for name in model.state_dict())

    def test_trains(self):
        """A few steps lower the loss."""
        torch.manual_seed(0)
        model, batch = _classifier(), (torch.rand(32, 4), torch.randint(3, (32,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []

        for _ in range(5):
            optimizer.zero_grad()
            losses.append(model.loss(model(batch), batch))
            losses[-1].backward()
            optimizer.step()

        assert losses[-1] < losses[0]

    @pytest.mark.parametrize(
        ("batch", "got"),
        [
            ({"image": 1, "label": 2}, r"dict with keys \['image', 'label'\]"),
            ((1, 2, 3), "tuple of 3"),
        ],
    )
    @pytest.mark.parametrize(
        "use",
        [
            lambda model, batch: model(batch),
            lambda model, batch: model.loss(torch.zeros(2, 3), batch),
            lambda model, batch: model.update_metric(batch, torch.zeros(2, 3), MeanMetric()),
        ],
    )
    def test_invalid_batches_raise(self, batch, got, use):
        """A batch that is not a pair raises an error with the remedy."""
        with pytest.raises(TypeError, match=rf"takes batches \(input, target\), got {got}\. .* ComposerModel"):
            use(_classifier(), batch)

    @pytest.mark.parametrize("form", [lambda rows: rows, lambda rows: [rows], lambda rows: (rows,)])
    def test_batches_without_targets(self, form):
        """The forward pass needs no targets; loss and metrics raise an error."""
        model, input = _classifier(), torch.rand(2, 4)

        outputs = model(form(input))

        assert torch.equal(outputs, model.module(input))
        with pytest.raises(TypeError, match=r"takes batches \(input, target\), got"):
            model.loss(outputs, form(input))
        with pytest.raises(TypeError, match=r"takes batches \(input, target\), got"):
            model.update_metric(form(input), outputs, MeanMetric())

    def test_loss_that_takes_integers(self):
        """Targets in the shape of the scores stay integers for a loss that needs them, of torch or of the user."""
        outputs, target = torch.rand(5, 3), torch.tensor([[1, -1, 0]] * 5)

        margin = _classifier(loss_fn=nn.MultiLabelMarginLoss()).loss(outputs, (None, target))
        picked = _classifier(loss_fn=lambda one, ids: one.gather(1, ids).sum()).loss(outputs, (None, target.abs()))

        torch.testing.assert_close(margin, nn.functional.multilabel_margin_loss(outputs, target))
        torch.testing.assert_close(picked, (2 * outputs[:, 1] + outputs[:, 0]).sum())

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
    @pytest.mark.parametrize(
        "loss_fn",
        [
            nn.functional.binary_cross_entropy,
            nn.functional.mse_loss,
            nn.HuberLoss(),
            partial(nn.functional.huber_loss, delta=0.5),
            nn.MultiLabelSoftMarginLoss(),
            partial(nn.functional.binary_cross_entropy_with_logits, pos_weight=torch.tensor(2.0)),
        ],
    )
    def test_loss_that_takes_floats(self, loss_fn, dtype):
        """Integers in the shape of the scores give the loss and the gradient of floats."""
        outputs, labels = torch.rand(5, 3, requires_grad=True), torch.randint(2, (5, 3))

        loss = _classifier(loss_fn=loss_fn).loss(outputs, (None, labels.to(dtype)))

        expected = loss_fn(outputs, labels.float())
        gradients = [torch.autograd.grad(each, outputs)[0] for each in (loss, expected)]
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(*gradients)

    @pytest.mark.parametrize("loss_fn", [nn.BCEWithLogitsLoss(), nn.BCELoss()])
    def test_binary_loss_of_another_shape(self, loss_fn):
        """The error states what to do, for several scores and for one."""
        with pytest.raises(ValueError, match=r"takes targets of shape \(5, 3\)\. Omit loss_fn for class ids\.$"):
            _classifier(loss_fn=loss_fn).loss(torch.rand(5, 3), (None, torch.zeros(5)))
        with pytest.raises(ValueError, match=r"Omit loss_fn, as one score has .* or return scores") as caught:
            _classifier(loss_fn=loss_fn).loss(torch.rand(5), (None, torch.zeros(5, 1)))
        assert str(caught.value).endswith("shape (5, 1).")
        assert "Class ids" not in str(caught.value)

    def test_binary_loss_of_one_score(self):
        """Scores (5, 1) fit class ids (5,), with a weight of the positive class."""
        outputs, labels = torch.randn(5, 1), torch.tensor([0, 1, 1, 0, 1])
        weighted = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))

        loss = _classifier(loss_fn=weighted).loss(outputs, (None, labels))

        log_odds = outputs[:, 0]
        expected = -(3 * labels * log_odds.sigmoid().log() + (1 - labels) * (-log_odds).sigmoid().log()).mean()
        torch.testing.assert_close(loss, expected)

    @pytest.mark.parametrize(
        "loss_fn",
        [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.functional.mse_loss, partial(nn.functional.huber_loss)],
    )
    @pytest.mark.parametrize("target", [torch.tensor([0, 1, 2]), torch.rand(3, 1)])
    def test_regression_loss_of_another_shape(self, loss_fn, target):
        """Scores (3, 3) and targets that torch would broadcast raise."""
        with pytest.raises(ValueError, match=r"takes targets of shape \(3, 3\)\. Omit loss_fn for class ids\.$"):
            _classifier(loss_fn=loss_fn).loss(torch.rand(3, 3), (None, target))


WEIGHT = torch.tensor([0.02, 0.3, 0.001])  # the sum over a batch is below 1
PROBABILITIES = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [0.1, 0.2, 0.7], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(label_smoothing=0.1), nn.NLLLoss(), nn.MultiMarginLoss()])
def test_another_reduction_of_a_module(loss_fn):
    """The loss of each sample, as SelectiveBackprop needs it, is that of a module with this reduction."""
    model, outputs, target = _classifier(loss_fn=loss_fn), torch.randn(4, 3), torch.tensor([0, 1, 2, 0])

    losses = model.loss(outputs, (None, target), reduction="none")

    assert losses.shape == (4,)
    torch.testing.assert_close(losses.mean(), model.loss(outputs, (None, target)))
    assert (model.loss_fn, loss_fn.reduction) == (loss_fn, "mean")


class OwnWeights(nn.CrossEntropyLoss):
    """A cross entropy that computes the weights itself."""

    def __init__(self):
        super().__init__(weight=1 / torch.tensor([5.0, 2.0, 9.0]))


LOG_LIKELIHOODS = [
    nn.NLLLoss(weight=WEIGHT, ignore_index=-100),
    partial(nn.functional.nll_loss, ignore_index=2),
    nn.functional.nll_loss,
]
CROSS_ENTROPIES = [
    cf.soft_cross_entropy,
    nn.CrossEntropyLoss(),
    nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1),
    nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2),
    OwnWeights(),
    nn.functional.cross_entropy,
    partial(nn.functional.cross_entropy, weight=WEIGHT, ignore_index=1),
    partial(cf.soft_cross_entropy, weight=WEIGHT),
]
IDS = [
    torch.tensor([0, 2, -100, 1, 0]),
    torch.tensor([0, 2, 1, 1, 0]),
    torch.tensor([[0, 2], [-100, -100], [1, 0], [2, 2], [1, -100]]),
]


class TestTerms:
    @pytest.mark.parametrize(
        ("loss_fn", "target"),
        [
            *itertools.product(LOG_LIKELIHOODS + CROSS_ENTROPIES, IDS),
            *((one, PROBABILITIES) for one in CROSS_ENTROPIES),
        ],
    )
    def test_loss_is_the_sum_divided_by_the_terms(self, loss_fn, target):
        """For any labels, the loss of a batch is that of its parts, weighted by their terms."""
        ignored = getattr(loss_fn, "ignore_index", getattr(loss_fn, "keywords", {}).get("ignore_index", -100))
        target = target.where(target != -100, ignored)
        shape = PROBABILITIES.shape if target.is_floating_point() else (5, 3, *target.shape[1:])
        model, outputs = _classifier(loss_fn=loss_fn), torch.randn(shape)

        def loss(rows):
            return model.loss(outputs[rows], (None, target[rows]))

        parts = [slice(0, 2), slice(2, 4), slice(4, 5)]
        terms = torch.stack([model.count_loss_terms((None, target[rows])) for rows in parts])
        means = torch.stack([loss(rows) for rows in parts])
        total = torch.where(terms == 0, 0.0, means * terms).sum() / terms.sum()
        torch.testing.assert_close(total, loss(slice(None)))

    @pytest.mark.parametrize(
        "loss_fn",
        [
            nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=WEIGHT),
            nn.MultiMarginLoss(weight=WEIGHT),
            nn.MultiLabelSoftMarginLoss(weight=WEIGHT),
            partial(nn.functional.cross_entropy, weight=WEIGHT, reduction="sum"),
            lambda outputs, target: nn.functional.cross_entropy(outputs, target, WEIGHT),
        ],
    )
    def test_samples(self, loss_fn):
        """Means over samples or elements, sums and other functions are not counted."""
        assert _classifier(loss_fn=loss_fn).count_loss_terms((None, torch.tensor([0, 1]))) is None

    @pytest.mark.parametrize(
        ("loss_fn", "expected"),
        [
            (nn.CrossEntropyLoss(), False),
            (nn.CrossEntropyLoss(reduction="sum"), True),
            (partial(nn.functional.cross_entropy, reduction="sum"), True),
            (DiceLoss(softmax=True, reduction="sum"), True),
            (binary_cross_entropy_with_logits, False),
            (partial(binary_cross_entropy_with_logits, scale_by_batch_size=False), True),
            (lambda outputs, target: outputs.sum(), False),
        ],
    )
    def test_sums(self, loss_fn, expected):
        """A loss is a sum if its setting states so, and a subclass with a loss of its own states it itself."""

        class Own(ComposerClassifier):
            def loss(self, outputs, batch):
                return self.loss_fn(outputs, batch[1]) / len(batch[1])

        assert _classifier(loss_fn=loss_fn).loss_is_sum is expected
        assert Own(nn.Linear(4, 3), loss_fn=loss_fn).loss_is_sum is False


class TestNumClasses:
    @pytest.mark.parametrize(
        ("module", "expected"),
        [
            (nn.Linear(4, 7), 7),
            (nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 2)), 2),
            (nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.LazyLinear(6)), 6),
        ],
    )
    def test_width_of_the_last_linear(self, module, expected):
        """The number of classes is inferred from the last linear layer."""
        assert ComposerClassifier(module).num_classes == expected

    def test_one_class_has_no_default_metrics(self):
        """num_classes=1 raises an error that suggests 2."""
        with pytest.raises(ValueError, match=r"num_classes is 1, .* Pass num_classes=2 if one score"):
            ComposerClassifier(nn.Linear(4, 1), num_classes=1)

    @pytest.mark.parametrize(
        ("settings", "error", "match"),
        [
            ({"num_classes": 0}, ValueError, "num_classes must be at least 1, got 0"),
            ({"module": "resnet18"}, TypeError, "module must be a torch.nn.Module, got str"),
            ({"loss_fn": 3}, TypeError, "loss_fn must be callable, got 3"),
            ({"train_metrics": "accuracy"}, TypeError, "train_metrics must be .* got str"),
            ({"val_metrics": [nn.ReLU()]}, TypeError, r"val_metrics must be .* got \['ReLU'\]"),
        ],
    )
    def test_bad_settings(self, settings, error, match):
        """A setting of the wrong type raises with its value."""
        with pytest.raises(error, match=match):
            ComposerClassifier(**{"module": nn.Linear(4, 3)} | settings)


class TestOneScore:
    """Binary classification with one logit."""

    @pytest.mark.parametrize("shape", [(6,), (6, 1)])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
    def test_loss_is_the_binary_cross_entropy(self, shape, dtype):
        """Class ids and probabilities of class 1 give torch's binary cross entropy of the logit."""
        outputs = torch.randn(shape)
        target = torch.tensor([0, 1, 1, 0, 1, 0]) if dtype == torch.int64 else torch.rand(shape)

        loss = ComposerClassifier(nn.Linear(4, 1)).loss(outputs, (None, target))

        expected = nn.functional.binary_cross_entropy_with_logits(outputs, target.reshape(shape).float())
        torch.testing.assert_close(loss, expected)

    @pytest.mark.parametrize("shape", [(4,), (4, 1)])
    def test_default_metrics(self, shape):
        """Accuracy counts positive logits as class 1, and the cross entropy is binary."""
        model = ComposerClassifier(nn.Linear(4, 1))
        outputs, target = torch.tensor([2.0, -1.0, 0.5, 3.0]).reshape(shape), torch.tensor([1, 0, 0, 1])
        metrics = model.get_metrics(is_train=False)

        values = {name: _seen(model, metric, outputs, target) for name, metric in metrics.items()}

        losses = [
            math.log1p(math.exp(-z if y else z)) for z, y in zip([2.0, -1.0, 0.5, 3.0], [1, 0, 0, 1], strict=True)
        ]
        assert values["MulticlassAccuracy"] == 0.75
        assert values["CrossEntropy"] == pytest.approx(sum(losses) / 4)

    def test_metrics_of_two_classes(self):
        """A metric for one score per sample receives a vector of them."""
        model = ComposerClassifier(nn.Linear(4, 1))

        value = _seen(model, BinaryAccuracy(), torch.tensor([[2.0], [-1.0], [0.5]]), torch.tensor([1, 0, 0]))

        assert value == pytest.approx(2 / 3)

    @pytest.mark.parametrize(
        ("metric", "classes", "loss_fn"),
        [
            (BinaryAccuracy(), 1, cf.soft_cross_entropy),
            (BinaryAveragePrecision(), 1, nn.BCEWithLogitsLoss()),
            (MultilabelAccuracy(3), 3, nn.functional.binary_cross_entropy_with_logits),
            (ClasswiseWrapper(MultilabelF1Score(3, average=None)), 3, partial(binary_cross_entropy_with_logits)),
            (MulticlassAUROC(3), 3, cf.soft_cross_entropy),
            (MulticlassCalibrationError(3, n_bins=5), 3, nn.CrossEntropyLoss()),
            (MulticlassF1Score(3), 3, nn.functional.cross_entropy),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_logits_between_zero_and_one(self, metric, classes, loss_fn):
        """Any split into batches gives the value of the probabilities, also if all logits of a batch are in 0..1."""
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(40, classes, generator=generator)
        logits[20:] = torch.rand(20, classes, generator=generator)
        if "Multiclass" in repr(metric):
            target, probabilities = torch.randint(classes, (40,), generator=generator), logits.softmax(1)
        else:
            target, probabilities = torch.randint(2, logits.shape, generator=generator), logits.sigmoid()
        model = ComposerClassifier(nn.Linear(4, classes), 3, [], [], loss_fn)
        expected = copy.deepcopy(metric)
        expected.update(probabilities, target)

        for part, labels in zip(logits.split(2), target.split(2), strict=True):
            model.update_metric((None, labels), part, metric)

        torch.testing.assert_close(metric.compute(), expected.compute())

    @pytest.mark.parametrize("loss_fn", [nn.BCELoss(), lambda outputs, target: outputs.mean()])
    def test_probabilities(self, loss_fn):
        """With a loss that may take probabilities, outputs are passed on as they are."""
        model = ComposerClassifier(nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), 2, [], BinaryAccuracy(), loss_fn)

        value = _seen(model, BinaryAccuracy(), torch.tensor([[0.2], [0.7]]), torch.tensor([0, 1]))

        assert value == 1.0

    def test_smoothing_is_that_of_two_classes(self):
        """With one score, a smoothed class id is the probability ``(1 - s) * id + s / 2`` of class 1."""
        model, outputs, target = ComposerClassifier(nn.Linear(4, 1)), torch.randn(3, 1), torch.tensor([1, 0, 1])
        model.loss_label_smoothing = 0.2

        loss = model.loss(outputs, (None, target))

        smoothed = torch.tensor([[0.9], [0.1], [0.9]])
        torch.testing.assert_close(loss, nn.functional.binary_cross_entropy_with_logits(outputs, smoothed))

    def test_trains(self):
        """A few steps on separable points lower the loss."""
        torch.manual_seed(0)
        points = torch.randn(32, 4)
        model, batch = ComposerClassifier(nn.Linear(4, 1)), (points, (points[:, 0] > 0).long())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []

        for _ in range(5):
            optimizer.zero_grad()
            losses.append(model.loss(model(batch), batch))
            losses[-1].backward()
            optimizer.step()

        assert losses[-1] < losses[0]


class TestMetrics:
    def test_default_names(self):
        """The default metrics have fixed names, as dashboards depend on them."""
        model = _classifier()

        assert list(model.get_metrics(is_train=True)) == ["MulticlassAccuracy"]
        assert set(model.get_metrics(is_train=False)) == {"MulticlassAccuracy", "CrossEntropy"}

    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=40), st.integers(1, 40))
    def test_default_values_do_not_depend_on_batch_split(self, pairs, size):
        """Accuracy and cross entropy are those of all samples, in batches of any size."""
        scores = 4.0 * nn.functional.one_hot(torch.tensor([guess for guess, _ in pairs]), 3).float()
        target = torch.tensor([truth for _, truth in pairs])
        model = _classifier()
        metrics = model.get_metrics(is_train=False)

        for metric in metrics.values():
            for outputs, labels in zip(scores.split(size), target.split(size), strict=True):
                model.update_metric((None, labels), outputs, metric)

        right = sum(guess == truth for guess, truth in pairs)
        assert metrics["MulticlassAccuracy"].compute().item() == pytest.approx(right / len(pairs))
        log_sum = torch.tensor([4.0, 0.0, 0.0]).logsumexp(0).item()
        expected = log_sum - 4.0 * right / len(pairs)
        assert metrics["CrossEntropy"].compute().item() == pytest.approx(expected, rel=1e-5, abs=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
    def test_accuracy_of_probabilities(self, dtype):
        """Accuracy compares with the most probable class; one-hot integers are accepted."""
        outputs = torch.tensor([[3.0, 1, 0], [0, 2, 1], [1, 0, 2]])
        target = torch.tensor([[10, 0, 0], [4, 3, 3], [2, 2, 6]]).to(dtype)

        accuracy = _seen(_classifier(), MulticlassAccuracy(3, average="micro"), outputs, target)

        assert accuracy == pytest.approx(2 / 3)

    @pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(ignore_index=i) for i in (-1, 0, 2, 255)] + [None])
    @pytest.mark.parametrize("shape", [(40,), (8, 5)])
    def test_defaults_ignore_what_the_loss_ignores(self, loss_fn, shape):
        """Accuracy and cross entropy are torchmetrics' and the loss, without the ids that the loss ignores."""
        model = _classifier() if loss_fn is None else _classifier(loss_fn=loss_fn)
        ignored = getattr(loss_fn, "ignore_index", -100)
        outputs, target = torch.randn(shape[0], 3, *shape[1:]), torch.randint(3, shape)
        target[:3] = ignored
        metrics = model.get_metrics(is_train=False)

        for part in (slice(0, 2), slice(2, None)):
            for metric in metrics.values():
                model.update_metric((None, target[part]), outputs[part], metric)

        expected = MulticlassAccuracy(3, average="micro", ignore_index=ignored)
        assert metrics["MulticlassAccuracy"].compute() == expected(outputs, target)
        torch.testing.assert_close(metrics["CrossEntropy"].compute(), model.loss(outputs, (None, target)))

    def test_mismatched_metric_raises(self):
        """A metric of 5 classes for 3 scores raises with its name."""
        model = _classifier(num_classes=5)

        with pytest.raises(ValueError, match=r"metric counts 5 classes, but the outputs of shape \(2, 3\)"):
            _seen(
                model, model.get_metrics(is_train=True)["MulticlassAccuracy"], torch.zeros(2, 3), torch.tensor([0, 1])
            )

    def test_state_dict_has_no_metrics(self):
        """Metrics are not in the state dict, before and after updates."""
        model = _classifier()
        _seen(model, model.get_metrics(is_train=False)["CrossEntropy"], torch.zeros(2, 3), torch.tensor([0, 1]))

        assert list(model.state_dict()) == ["module.weight", "module.bias"]

    def test_copies_are_independent(self):
        """A deep copy, as EMA makes one, shares neither weights nor counts."""
        model = _classifier()
        other = copy.deepcopy(model)

        _seen(model, model.get_metrics(is_train=True)["MulticlassAccuracy"], torch.zeros(2, 3), torch.tensor([0, 1]))

        assert not other.get_metrics(is_train=True)["MulticlassAccuracy"].update_called
        assert other.module.weight is not model.module.weight


class TestSeveralLabels:
    """Targets with 0 or 1 for each of several labels."""

    labels = torch.tensor([[0, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 1]])

    def updated(self, model, target, *, is_train=False):
        metrics = model.get_metrics(is_train=is_train)
        for metric in metrics.values():
            model.update_metric((None, target), 4.0 * self.labels - 2.0, metric)
        return {name: float(metric.compute()) for name, metric in metrics.items()}

    @pytest.mark.parametrize(
        "loss_fn",
        [nn.BCEWithLogitsLoss(), nn.MultiLabelSoftMarginLoss(), nn.functional.binary_cross_entropy_with_logits],
    )
    @pytest.mark.parametrize("dtype", [torch.long, torch.float32])
    def test_default_metrics_follow_the_loss(self, loss_fn, dtype):
        """Of predictions that are all right they are 1, and of one wrong label in twelve the accuracy is 11/12."""
        model = ComposerClassifier(nn.Linear(4, 3), loss_fn=loss_fn)
        wrong = self.labels.clone()
        wrong[0, 0] = 1

        assert self.updated(model, self.labels.to(dtype)) == {"MultilabelAccuracy": 1.0, "MultilabelF1Score": 1.0}
        assert self.updated(model, wrong.to(dtype), is_train=True) == {"MultilabelAccuracy": pytest.approx(11 / 12)}

    @pytest.mark.parametrize(
        ("module", "num_classes", "has_labels"),
        [
            (nn.Linear(4, 2), None, True),
            (nn.Linear(4, 2), 2, True),
            (nn.Linear(4, 1), None, False),
            (nn.Linear(4, 1), 2, False),
            (nn.Identity(), 2, False),
            (nn.Identity(), 3, True),
        ],
    )
    def test_one_score_is_no_label(self, module, num_classes, has_labels):
        """A module for two classes that may return one score has the metrics of classes."""
        model = ComposerClassifier(module, num_classes, loss_fn=nn.BCEWithLogitsLoss())

        assert list(model.get_metrics(is_train=True)) == [f"Multi{'label' if has_labels else 'class'}Accuracy"]

    @pytest.mark.parametrize("loss_fn", [nn.MSELoss(), binary_cross_entropy_with_logits])
    def test_metrics_of_one_class_raise(self, loss_fn):
        """With another loss the default metrics are those of classes, which several labels do not have."""
        model = ComposerClassifier(nn.Linear(4, 3), loss_fn=loss_fn)

        for is_train in (True, False):
            with pytest.raises(ValueError, match=r"several labels\. Pass train_metrics= .*MultilabelAccuracy\(3\)"):
                self.updated(model, self.labels, is_train=is_train)
        with pytest.raises(ValueError, match="CrossEntropy is a metric of samples with one class"):
            model.update_metric((None, self.labels), torch.randn(4, 3), CrossEntropy())

    def test_lists_of_labels_raise(self):
        """The targets of nn.MultiLabelMarginLoss are lists of ids, which end with -1."""
        model = ComposerClassifier(nn.Linear(4, 3), loss_fn=nn.MultiLabelMarginLoss())
        target = torch.tensor([[1, 2, -1], [0, 1, -1], [-1, -1, -1], [0, 2, -1]])

        for is_train in (True, False):
            with pytest.raises(ValueError, match="is a metric of samples with one class, and the targets have samples"):
                self.updated(model, target, is_train=is_train)

    @pytest.mark.parametrize("target", [torch.eye(3)[[0, 1, 2, 0]].long(), torch.rand(4, 3).softmax(1)])
    def test_probabilities_are_one_label(self, target):
        """One-hot rows and probabilities have a most probable class."""
        assert "MulticlassAccuracy" in self.updated(ComposerClassifier(nn.Linear(4, 3), loss_fn=nn.MSELoss()), target)

    @pytest.mark.parametrize("shape", [(4, 1), (4,), (4, 3)])
    @pytest.mark.parametrize("loss_fn", [nn.MSELoss(), nn.L1Loss()])
    def test_numbers_raise(self, shape, loss_fn):
        """Numbers to predict have no class: the error names the class for regressions."""
        width = 3 if shape == (4, 3) else 1
        model = ComposerClassifier(nn.Linear(4, width), loss_fn=loss_fn)
        target = torch.tensor([0.5, 2.0, 3.0, 9.0]) if width == 1 else -torch.rand(4, 3)

        for metric in model.get_metrics(is_train=False).values():
            with pytest.raises(ValueError, match=r"neither class ids nor probabilities: .* Use ComposerRegressor for"):
                model.update_metric((None, target.reshape(shape)), torch.rand(shape), metric)


class Operations(TorchDispatchMode):
    """Counts the operations that compute, of which each is a kernel on a GPU, or a few."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Call an operation."""
        if function.overloadpacket.__name__ not in {"detach", "alias", "view", "ones_like", "zeros_like"}:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


class TestWithoutLabels:
    """A batch on another device than the CPU, of which the host does not read whether it has labels."""

    def test_operations(self):
        """The value costs three operations more than torch's loss, and its gradients none."""
        model, scores = _classifier(), torch.empty(4, 3, device="meta", requires_grad=True)
        target = torch.empty(4, dtype=torch.long, device="meta")
        with Operations() as plain:
            torch.autograd.grad(nn.functional.cross_entropy(scores, target), scores)
        with Operations() as counted:
            torch.autograd.grad(model.loss(scores, (None, target)), scores)

        further = list(counted.names)
        for name in plain.names:
            further.remove(name)

        assert further == ["eq", "all", "masked_fill_"]

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("ignored", [0, 3, 4])
    def test_loss_and_gradients(self, monkeypatch, ignored, smoothing):
        """Those of torch's loss; 0 if all labels are ignored."""
        monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)
        scores, target = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
        target[:ignored] = -100
        expected = nn.functional.cross_entropy(scores, target, label_smoothing=smoothing)
        (wanted,) = torch.autograd.grad(expected, scores)

        model = _classifier(loss_fn=cf.soft_cross_entropy)
        model._label_smoothing = smoothing
        loss = model.loss(scores, (None, target))
        (found,) = torch.autograd.grad(loss, scores)

        assert torch.equal(loss, expected.nan_to_num())
        assert torch.equal(found, torch.zeros(4, 3) if ignored == 4 else wanted)

    def test_scores_that_are_no_numbers(self, monkeypatch):
        """A NaN of another cause stays, with its gradients."""
        monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)
        scores = torch.full((2, 3), math.nan, requires_grad=True)

        loss = _classifier().loss(scores, (None, torch.tensor([0, -100])))
        loss.backward()

        assert loss.isnan()
        assert scores.grad[0].isnan().all()

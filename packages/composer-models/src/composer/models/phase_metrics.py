"""Bases of models with metrics of training and of evaluation, and how these metrics are updated."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from composer.functional.checks import check_callables, check_modules
from composer.loss._calling import in_float32, keep_settings
from composer.models.base import ComposerModel, pair_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchmetrics import Metric, MetricCollection

    Metrics: TypeAlias = "Metric | MetricCollection | Sequence[Metric] | Mapping[str, Metric]"

_GUESSING = "torchmetrics.classification."
_FUNCTION = "_composer_function"


class PhaseMetricsModel(ComposerModel):
    """Base of models with ``train_metrics`` and ``val_metrics``."""

    train_metrics: MetricCollection | nn.ModuleDict
    val_metrics: MetricCollection | nn.ModuleDict

    def _set_metrics(
        self, train: Metrics, val: Metrics, names: tuple[str, str] = ("train_metrics", "val_metrics")
    ) -> None:
        """Set the metrics of both phases; those of evaluation are copied if they are also metrics of training."""
        self.train_metrics, self.val_metrics = as_collection(train, names[0]), as_collection(val, names[1])
        if not set(self.train_metrics.modules()).isdisjoint(self.val_metrics.modules()):
            self.val_metrics = copy.deepcopy(self.val_metrics)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Return the metrics of a phase.

        Args:
            is_train: Whether to return ``train_metrics`` or ``val_metrics``.

        Returns:
            Metrics by the name under which they are logged: the name in the dict or collection, else the class name.

        Raises:
            TypeError: The attribute has been set to another type than a metric or a ``MetricCollection``.
        """
        name = "train_metrics" if is_train else "val_metrics"
        return by_name(getattr(self, name), name)


class PairModel(PhaseMetricsModel):
    """Base of models around a module, with batches that are pairs of its input and a target."""

    _pair_names: ClassVar[str] = "(input, target)"

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        check_modules(module=module)
        check_callables(loss_fn=loss_fn)
        self.module = module
        keep_settings(loss_fn)
        self.loss_fn = loss_fn

    def forward(self, batch: tuple[Any, Tensor] | tuple[Any] | Tensor) -> Any:
        """Compute the module's outputs for the batch's inputs.

        Args:
            batch: A pair ``(input, target)``; or without targets the input tensor, or ``(input,)``.

        Returns:
            The outputs, such as scores ``(N, C, ...)`` of a classifier, or predictions ``(N, ...)`` of a regressor.

        Raises:
            TypeError: ``batch`` is none of these.
        """
        if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):  # without another call in each step
            input = batch[0]
        else:
            input = batch if isinstance(batch, Tensor) else self._pair(batch)[0]
        # self.module would take half a microsecond longer, because nn.Module looks it up last.
        return self._modules["module"](input)  # type: ignore[misc]

    def _pair(self, batch: Any) -> tuple[Any, Tensor]:
        if isinstance(batch, (tuple, list)) and len(batch) == 2:  # without another call in each step
            return batch[0], batch[1]
        return pair_of(batch, type(self).__name__, self._pair_names)


def as_collection(metrics: Metrics | nn.ModuleDict, name: str) -> MetricCollection | nn.ModuleDict:
    """Return the metrics as one module, which moves to a device together with the model.

    Without metrics, torchmetrics is not imported, which takes a second, and 137 MiB if torchvision is installed.

    Args:
        metrics: A metric, a ``MetricCollection``, or a list or dictionary of metrics; may be empty.
        name: The name of the argument.

    Raises:
        TypeError: ``metrics`` contains another type.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> list(as_collection([MeanMetric()], "val_metrics"))
        ['MeanMetric']
    """
    # An empty ModuleDict is the result of this function for an earlier model.
    if isinstance(metrics, (list, tuple, dict, nn.ModuleDict)) and not metrics:
        return nn.ModuleDict()
    from torchmetrics import Metric, MetricCollection  # noqa: PLC0415 (takes a second)

    if isinstance(metrics, MetricCollection):
        return metrics
    several = [metrics] if isinstance(metrics, Metric) else metrics
    values = list(several.values()) if isinstance(several, Mapping) else several
    if not isinstance(values, (list, tuple)) or not all(
        isinstance(each, (Metric, MetricCollection)) for each in values
    ):
        got = [type(each).__name__ for each in values] if isinstance(values, (list, tuple)) else type(metrics).__name__
        raise TypeError(
            f"{name} must be a torchmetrics Metric, a MetricCollection, or a list or dict of metrics, got {got}. "
            "Import them, such as torchmetrics.classification.MulticlassAccuracy(num_classes)."
        )
    # Compute groups share state if updated together; a trainer updates each metric separately.
    return MetricCollection(dict(several) if isinstance(several, Mapping) else list(values), compute_groups=False)


def by_name(metrics: object, name: str) -> dict[str, Metric]:
    """Return the metrics by the names under which they are logged.

    Args:
        metrics: The result of :func:`as_collection`, or the later value of the attribute.
        name: The attribute's name.

    Raises:
        TypeError: ``metrics`` is neither a metric nor a ``MetricCollection``.
    """
    if isinstance(metrics, nn.ModuleDict) and not metrics:
        return {}
    from torchmetrics import Metric, MetricCollection  # noqa: PLC0415 (takes a second)

    if isinstance(metrics, Metric):
        return {type(metrics).__name__: metrics}
    if isinstance(metrics, MetricCollection):
        return dict(metrics.items())
    raise TypeError(
        f"{name} must be a torchmetrics Metric or MetricCollection, got {type(metrics).__name__}. "
        f"Set it to MetricCollection(...)."
    )


def to_probabilities(metric: Metric, logits: Tensor, target: Tensor | None = None) -> Tensor:
    """Return probabilities for a metric of torchmetrics that computes them from logits; logits for other metrics.

    By itself, it takes logits that are all between 0 and 1 in a batch for probabilities.

    Args:
        metric: The metric, or a wrapper of it. One with ``num_classes`` gets the softmax, another the sigmoid.
        logits: Shape ``(N, C, ...)`` or ``(N,)``. A metric that only compares the scores of classes gets them.
        target: Class ids. Of the two scores of a class id, a metric without ``num_classes`` gets the probability of 1.
    """
    if not logits.is_floating_point():
        return logits
    known = vars(metric)  # the inner metrics do not change; a hash of the metric, as a key, would change with its state
    if _FUNCTION not in known:
        known[_FUNCTION] = _function_for(metric)
    if known[_FUNCTION] is not None:
        logits = in_float32(logits)  # in 16 bits, probabilities near 1 would be equal
    if known[_FUNCTION] == "sigmoid" and target is not None and logits.shape == (*target.shape, 2):
        logits = logits[..., 1] - logits[..., 0]
    if known[_FUNCTION] == "softmax":
        return logits.softmax(1)
    return logits.sigmoid() if known[_FUNCTION] == "sigmoid" else logits


def _function_for(metric: Metric) -> str | None:
    from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassStatScores  # noqa: PLC0415

    updates = [(each, getattr(type(each), "update", None)) for each in metric.modules()]
    guessing = [one for one, update in updates if getattr(update, "__module__", "").startswith(_GUESSING)]
    if not guessing:
        return None
    if getattr(guessing[0], "num_classes", None) is None:
        return "sigmoid"
    return None if isinstance(guessing[0], (MulticlassConfusionMatrix, MulticlassStatScores)) else "softmax"


def update_metric(metric: Metric, outputs: Any, target: Any) -> None:
    """Update a metric; an error gets a note with the metric, and the types and shapes that it received."""
    try:
        metric.update(outputs, target)
    except Exception as error:
        error.add_note(f"{type(metric).__name__}.update received outputs {_kind(outputs)} and targets {_kind(target)}.")
        raise


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_one_label(metric: Metric, outputs: Tensor, target: Tensor) -> None:
    """Raise a ValueError if the first batch of a metric of classes has samples with several labels, or numbers."""
    # Only of the first, as the host waits for the device. Numbers above 1 are weights of classes, such as votes, and
    # integers below 0 follow the ids of a list, as nn.MultiLabelMarginLoss takes it.
    if metric.update_called or target.shape != outputs.shape:
        return
    has_numbers = target.is_floating_point()  # below 0, or with one score above 1, as its targets are (1 - t, t) here
    if has_numbers and bool((target < -1e-3).any()):
        raise ValueError(
            f"{type(metric).__name__} is a metric of classes, and the targets are neither class ids nor probabilities: "
            "some are below 0 or, for one score, above 1. Use ComposerRegressor for numbers to predict, or pass "
            "train_metrics= and val_metrics=, [] for none."
        )
    are_lists = (target < 0).any() & (not has_numbers)
    if bool(are_lists | ((target.sum(1) > 1.5).any() & (target <= 1).all())):
        count = outputs.shape[1]
        raise ValueError(
            f"{type(metric).__name__} is a metric of samples with one class, and the targets have samples with several "
            f"labels. Pass train_metrics= and val_metrics= for several, such as MultilabelAccuracy({count}) of "
            "torchmetrics.classification, which are the default with loss_fn=nn.BCEWithLogitsLoss() in a "
            "ComposerClassifier; [] for none."
        )


def class_ids(outputs: Tensor, target: Tensor, metric: Metric) -> Tensor:
    """Return the targets for a metric with ``num_classes``."""
    if not outputs.is_floating_point():
        return target
    num_classes: int = getattr(metric, "num_classes")  # noqa: B009  (declared by its subclasses)
    if outputs.ndim < 2 or outputs.shape[1] != num_classes:
        raise ValueError(
            f"The metric counts {num_classes} classes, but the outputs of shape {tuple(outputs.shape)} do not hold as "
            "many scores per sample. Pass num_classes to the model, or create the metric with their number."
        )
    check_one_label(metric, outputs, target)
    return target.argmax(dim=1) if target.ndim == outputs.ndim else target


def is_one_score(outputs: object) -> bool:
    """Return whether outputs are one logit for each sample or pixel, of shape ``(N,)`` or ``(N, 1, ...)``."""
    if not isinstance(outputs, Tensor):
        return False
    shape = outputs.shape
    return (len(shape) == 1 or (len(shape) > 1 and shape[1] == 1)) and outputs.is_floating_point()


def fits_one_score(target: Tensor, score: Tensor) -> bool:
    """Return whether a target has the shape of one score ``(N, 1, ...)``, or ``(N, ...)``."""
    return target.shape in (score.shape, score.shape[:1] + score.shape[2:])


def two_scores(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores ``(N, 2, ...)`` of both classes, whose softmax is the sigmoid of the one score, and targets."""
    score = outputs.unsqueeze(1) if outputs.ndim == 1 else outputs
    if target.is_floating_point() and fits_one_score(target, score):
        target = target.reshape(score.shape)
        target = torch.cat([1 - target, target], dim=1)
    elif target.shape == score.shape:
        target = target.squeeze(1)
    return torch.cat([torch.zeros_like(score), score], dim=1), target

"""Evaluators, and the model in an evaluation: its mode, and averaged weights of an optimizer or algorithm."""

from __future__ import annotations

import contextlib
import difflib
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from attrs.validators import optional
from torch import Tensor, nn

from composer.core.checks import NamesArguments, integer, is_flag, is_string, is_subset, nearest, to_strings
from composer.core.data.spec import DataSpec, ensure_data_spec
from composer.core.event import Event
from composer.core.interval import Interval
from composer.core.optimizers import HasOptimizers, held_parameters, unwrapped
from composer.functional.dtensors import local_parts, reshard
from composer.functional.modes import kept_modes

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from composer.core.interval import Clock
    from composer.core.time import Time

_log = logging.getLogger(__name__)

EvalInterval = Callable[[Any, Event], bool]
"""``f(state, event)``; without the class of the state, which refers to evaluators."""


def evaluate_periodically(eval_interval: Time | str | int, eval_at_fit_end: bool = True) -> EvalInterval:
    """Return a function that decides whether to evaluate now.

    Args:
        eval_interval: The interval; a whole number is in epochs, 0 disables evaluation.
        eval_at_fit_end: Whether to evaluate also when training ends between two intervals, unless
            ``state.stop_training()`` has ended it.

    Example:
        >>> evaluate_periodically("10ba")
        evaluate_periodically('10ba')
    """
    return _Periodically(Interval.named("eval_interval", eval_interval), eval_at_fit_end)


@attrs.define(repr=False)
class _Periodically:
    interval: Interval
    at_fit_end: bool
    _last: int = attrs.field(default=-1, init=False)

    def __call__(self, state: Clock, event: Event) -> bool:
        if not self.interval.every.value:
            return False
        batch = int(state.timestamp.batch)
        if event is Event.FIT_END:
            return self.at_fit_end and self._last != batch
        due = self.interval.is_due(state)
        # Stored only here: several evaluators may share this function, and each calls it at FIT_END.
        # A later one was in a training before the clock was reset.
        self._last = batch if due else -1 if self._last > batch else self._last
        return due

    def __repr__(self) -> str:
        return f"evaluate_periodically('{self.interval.every}')"


def _to_names(names: str | Iterable[str] | None) -> list[str] | None:
    return None if names is None else to_strings("metric_names", names)


def _to_data_spec(dataloader: DataSpec | Iterable[Any] | None) -> DataSpec:
    return ensure_data_spec([] if dataloader is None else dataloader)


def _to_eval_interval(interval: EvalInterval | Time | str | int | None) -> EvalInterval | None:
    return interval if interval is None or callable(interval) else evaluate_periodically(interval)


@attrs.define(kw_only=True, eq=False)
class Evaluator(NamesArguments):
    """A data set for evaluation.

    Args:
        label: Its name in logs: ``metrics/<label>/<metric>``.
        dataloader: A data loader or a :class:`DataSpec`; None for one without batches, which cannot be evaluated.
        metric_names: The names of the model's metrics to compute; all if None.
        subset_num_batches: The number of batches to evaluate, -1 for all; None uses the trainer's setting.
        eval_interval: The interval: a time, a string, a number of epochs, or a function ``f(state, event) -> bool``
            which is called at ``BATCH_END``, ``EPOCH_END``, ``ITERATION_END`` and ``FIT_END``; None uses the trainer's
            setting.
        device_eval_microbatch_size: Samples in a microbatch; None does not split batches.
        training_weights: Whether to evaluate the trained weights, and not the averages of an algorithm, such as
            EMA, or of an optimizer.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: A number is out of range, or ``label`` is empty.

    Example:
        >>> Evaluator(label="eval", dataloader=[], eval_interval="2ep").eval_interval
        evaluate_periodically('2ep')
    """

    label: str = attrs.field(validator=is_string)
    dataloader: DataSpec = attrs.field(converter=_to_data_spec)
    metric_names: list[str] | None = attrs.field(default=None, converter=_to_names)
    subset_num_batches: int | None = attrs.field(default=None, validator=optional(is_subset))
    eval_interval: EvalInterval | None = attrs.field(default=None, converter=_to_eval_interval)
    device_eval_microbatch_size: int | None = integer(None, 1, meaning="It is a number of samples, or None.")
    training_weights: bool = attrs.field(default=False, validator=is_flag)
    order: Any = attrs.field(default=None, init=False, repr=False)
    """How a Trainer iterates over data whose workers are persistent, so that its next evaluation has the same ones."""


class MetricValues(dict[str, Any]):
    """The latest values of metrics by evaluator and name, ``values["eval"]["MulticlassAccuracy"]``.

    If only one evaluator has a metric, its name alone is a key, too: ``values["MulticlassAccuracy"]``,
    ``values.get("MulticlassAccuracy")`` and ``"MulticlassAccuracy" in values``. :meth:`items`, :meth:`keys` and
    :meth:`values` have the metrics alone if no two evaluators have one of the same name, and otherwise after the
    evaluators; iteration, ``len`` and ``dict(values)`` have what was recorded. Values that were assigned by name only,
    remain until an evaluation computes the metric.

    Raises:
        KeyError: In a look-up: there is no such label and metric, or several evaluators have the metric.

    Example:
        >>> values = MetricValues(easy={"Accuracy": 0.9}, hard={"Accuracy": 0.5, "Loss": 1.2})
        >>> values["hard"]["Accuracy"], values["Loss"], "Accuracy" in values
        (0.5, 1.2, False)
    """

    def __missing__(self, name: str) -> Any:
        labels = self._labels_with(name)
        if len(labels) == 1:
            return self[labels[0]][name]
        if labels:
            raise KeyError(f"{name!r} is a metric of {', '.join(labels)}: read [{labels[0]!r}][{name!r}].")
        known = {*self, *(metric for values in dict(self).values() if isinstance(values, Mapping) for metric in values)}
        raise KeyError(f"There is no evaluator or metric {name!r}{nearest_metric(name, known)}")

    def __reduce__(self) -> Any:  # a copy is made of what is recorded, not of items()
        return type(self), (dict(self),)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or len(self._labels_with(name)) == 1

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an evaluator or metric, or ``default``."""
        return self[name] if name in self else default  # noqa: SIM401  (which is this method)

    def items(self) -> Any:
        """Return the metrics and their values; first evaluators and theirs, if several have a metric of one name."""
        of_evaluators = {label: values for label, values in super().items() if isinstance(values, Mapping)}
        names = [name for values in of_evaluators.values() for name in values if len(self._labels_with(name)) == 1]
        hidden = of_evaluators if len(names) == sum(map(len, of_evaluators.values())) else ()
        return {name: self[name] for name in (*(key for key in self if key not in hidden), *names)}.items()

    def keys(self) -> Any:
        """Return the names of :meth:`items`."""
        return dict(self.items()).keys()

    def values(self) -> Any:
        """Return the values of :meth:`items`."""
        return dict(self.items()).values()

    def record(self, label: str, values: Mapping[str, Any]) -> None:
        """Replace the values of an evaluator."""
        for name in values:
            if not isinstance(super().get(name), Mapping):
                self.pop(name, None)
        self[label] = dict(values)

    def _labels_with(self, name: object) -> list[str]:
        return [label for label, values in super().items() if isinstance(values, Mapping) and name in values]


def more_is_better(metrics: Mapping[str, Any], name: str) -> bool | None:
    """Return whether a metric improves when it grows, as it declares; None if it declares nothing or does not exist.

    One that declares nothing does not if its name has ``loss``, ``error`` or ``perplexity``.

    Args:
        metrics: Metrics by name, each with torchmetrics' attribute ``higher_is_better``.
        name: Name of a metric, or ``"name/part"`` of one that computes several values.

    Example:
        >>> class HammingDistance:
        ...     higher_is_better = False
        >>> metrics = {"HammingDistance": HammingDistance()}
        >>> more_is_better(metrics, "HammingDistance"), more_is_better(metrics, "Other")
        (False, None)
    """
    found = dict(metrics.items())  # a MetricCollection has no method `get`
    metric = found.get(name, found.get(name.partition("/")[0]))
    is_loss = metric is not None and any(word in name.lower() for word in ("loss", "error", "perplexity"))
    declared: bool | None = getattr(metric, "higher_is_better", None)
    return False if declared is None and is_loss else declared


def nearest_metric(name: str, known: Iterable[str], end: str = ".") -> str:
    """Return the end of a sentence: a suggestion of a metric, or ``end`` if none is similar enough.

    The metric has a similar name, or one that contains the last word of ``name``; if several labels have it, it is that
    of the label in ``name``, or else the last.

    Args:
        name: A name with or without a label.
        known: The metrics as ``"label/metric"``.
        end: The end without a suggestion.

    Example:
        >>> nearest_metric("val/acc", ["train/MulticlassAccuracy", "eval/F1", "eval/MulticlassAccuracy"])
        "; did you mean 'eval/MulticlassAccuracy'?"
        >>> nearest_metric("eval/f2", ["eval/MSE"])
        '.'
    """
    metric = name.casefold().rpartition("/")[2]
    word = re.split("[^a-z0-9]+", metric)[-1]
    names = {one: one.casefold().rpartition("/")[2][:100] for one in known}  # a comparison is quadratic in the length
    close = difflib.get_close_matches(metric[:100], names.values(), n=1)
    found = [one for one in names if names[one] in close] or [
        one for one in names if len(word) > 1 and word in names[one]
    ]
    return nearest(name, found if "/" in name else found[-1:], end, similarity=0.0)


def unknown_metric(parameter: str, name: str, known: Iterable[str]) -> ValueError:
    """Return the error for a metric that does not exist.

    Args:
        parameter: The name of the parameter.
        name: What was given, as ``"label/metric"``.
        known: The metrics that exist.

    Example:
        >>> unknown_metric("save_best", "eval/f1", ["eval/F1", "eval/Accuracy"])
        ValueError("save_best must be one of ['eval/F1', 'eval/Accuracy'], got 'eval/f1'; did you mean 'eval/F1'?")
    """
    loss = (
        ". For a loss, add LossMetric(loss_fn) of composer.metrics, or LanguageCrossEntropy(), to those of the model."
    )
    hint = nearest_metric(name, names := list(known), loss if "loss" in name.casefold() else ".")
    return ValueError(f"{parameter} must be one of {names}, got {name!r}{hint}")


def ensure_evaluator(
    evaluator: Evaluator | DataSpec | Iterable[Any], default_metric_names: Sequence[str] | None = None
) -> Evaluator:
    """Return an :class:`Evaluator` from one, or from a data loader, which is labelled ``"eval"``."""
    if isinstance(evaluator, Evaluator):
        return evaluator
    return Evaluator(label="eval", dataloader=evaluator, metric_names=default_metric_names)


def enter_training_mode(model: nn.Module) -> None:
    """Put a model into training mode by its method ``train``, except for ``frozen_norms(model)``.

    Logs once for each model how many modules this has switched, as those of a model that ``from_pretrained`` returned.

    Example:
        >>> frozen = nn.BatchNorm1d(2).eval().requires_grad_(False)
        >>> model = nn.Sequential(frozen, nn.Dropout().eval())
        >>> enter_training_mode(model)
        >>> [module.training for module in model]
        [False, True]
    """
    evaluating, norms = [module for module in model.modules() if not module.training], frozen_norms(model)
    model.train()
    for norm in norms:
        norm.eval()
    switched, updated = sum(module.training for module in evaluating), len(frozen_norms(model, training=True))
    if (switched or updated) and model not in _reported:
        _reported.add(model)
        # The base of adapters of PEFT is in evaluation mode as from_pretrained returned it, and trains like any other.
        if switched and not any(hasattr(module, "peft_config") for module in model.modules()):
            _log.warning(_SWITCHED, switched, sum(1 for _ in model.modules()), type(model).__name__)
        if updated:
            _log.warning(_UPDATED, updated, type(model).__name__)


_SWITCHED = (
    "%d of the %d modules of %s were in evaluation mode and are in training mode now, as the training calls "
    "model.train(). To keep the mode of some, define train(self, mode=True) in the model, which calls super().train("
    "mode) and then eval() of these. Frozen layers with running statistics stay in evaluation mode."
)
_UPDATED = "%d frozen normalization layers of %s update their running statistics: eval() of them freezes these, too."
_reported: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def frozen_norms(model: nn.Module, *, training: bool = False) -> list[nn.Module]:
    """Return the normalization layers with running statistics that are in a mode and have frozen parameters.

    Example:
        >>> norm = nn.BatchNorm1d(2).eval()
        >>> frozen_norms(norm), len(frozen_norms(norm.requires_grad_(False)))
        ([], 1)
    """
    return [
        module
        for module in model.modules()
        if module.training is training
        and getattr(module, "running_mean", None) is not None
        and {parameter.requires_grad for parameter in module.parameters(recurse=False)} == {False}
    ]


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of each of its modules at the end.

    Example:
        >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with evaluation_mode(model):
        ...     model.training
        False
        >>> [module.training for module in model]
        [True, False]
    """
    with kept_modes(model):
        model.eval()
        yield


@contextlib.contextmanager
def evaluation_weights(state: HasOptimizers) -> Iterator[bool]:
    """A context in which the model has its weights for evaluation; on exit it has its training weights again.

    Optimizers with the methods ``train()`` and ``eval()``, such as schedule-free ones, write their averages into the
    model, also if SAM wraps them. The averages of an algorithm such as EMA or SWA replace these. Contexts may be
    nested, and the training weights are restored bit for bit, also after an error.

    Args:
        state: The state with the model, the optimizers and the algorithms.

    Yields:
        Whether the weights may differ from the training weights.

    Example:
        >>> from composer.algorithms import EMA
        >>> from composer.core import Engine, Event, State
        >>> model, ema = torch.nn.Linear(1, 1, bias=False), EMA(half_life=None, smoothing=0.5)
        >>> state = State(model, algorithms=ema)
        >>> engine = Engine(state)
        >>> for weight in (0.0, 1.0):
        ...     _ = torch.nn.init.constant_(model.weight, weight)
        ...     ema.apply(Event.BATCH_END, state, engine.logger)
        >>> with evaluation_weights(state):
        ...     model.weight.item()
        0.5
        >>> model.weight.item()
        1.0
    """
    switching = [one for one in map(unwrapped, state.optimizers) if has_modes(one)]
    with contextlib.ExitStack() as stack:
        # One that is in evaluation mode already has been switched by an outer context.
        for optimizer in switching:
            if any(group.get("train_mode", True) for group in optimizer.param_groups):
                stack.enter_context(_averages_of(optimizer, state.model))
        blocks = [block for one in state.algorithms if (block := one.evaluation_weights(state)) is not None]
        for block in blocks:
            stack.enter_context(block)
        yield bool(switching or blocks)


def has_modes(optimizer: Any) -> bool:
    """Return whether an optimizer has separate weights for evaluation.

    Example:
        >>> has_modes(torch.optim.SGD([torch.zeros(1)]))
        False
    """
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


@contextlib.contextmanager
def _averages_of(optimizer: Any, model: Any) -> Iterator[None]:
    # Copies, because train() computes the weights from the averages, with rounding errors.
    copies = [weight.clone() for weight in _weights(optimizer)]
    try:
        reshard(model)
        optimizer.eval()
        yield
    finally:
        reshard(model)
        optimizer.train()
        with torch.no_grad():
            torch._foreach_copy_(_weights(optimizer), copies)


def _weights(optimizer: Optimizer) -> list[Tensor]:
    """Return the optimizer's weights; of sharded ones (DTensors) the local shards."""
    return local_parts([parameter.detach() for parameter in held_parameters(optimizer.param_groups)])

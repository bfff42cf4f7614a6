"""A model with several heads, each with its own targets, loss and metrics."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from composer.functional.checks import check_modules, check_numbers
from composer.models.base import ComposerModel, pair_of

if TYPE_CHECKING:
    from torchmetrics import Metric

    from composer.models.phase_metrics import PairModel

_TASK = "_composer_task"
_CHECKED_PARTS = 8


class ComposerMultiTask(ComposerModel):
    """A shared module with several heads: a loss, a weight and metrics for each.

    ``loss = sum over tasks of weight[task] * loss[task]``

    Batches are pairs ``(input, targets)`` with a dictionary of targets by task. Each task is a model such as
    :class:`~composer.models.ComposerRegressor` or :class:`~composer.models.ComposerClassifier` around its head, which
    gets the features that ``module`` returns; or, if the module has the heads and returns a dictionary by task, around
    ``nn.Identity()``. Outputs, losses and metrics have the names of the tasks: ``loss/train/age``,
    ``metrics/eval/age/MeanAbsoluteError``. Losses are logged with their weight. Predictions are a dictionary by task.

    Metrics of tasks are copied, so that several tasks may be given the same.

    Losses of microbatches and processes are weighted by samples. If the loss of a task is a mean over anything else, as
    with ignored targets or weights of classes, a split of a batch changes the step, which is warned of. Sums, as of
    ``nn.CrossEntropyLoss(reduction="sum")`` for each task, are added exactly.

    Args:
        module: Maps inputs to features, or to a dictionary of outputs by task.
        tasks: A model for each task by name, whose ``loss`` and metrics get the pair ``(input, targets[name])``.
        weights: The weight of the loss of tasks by name; 1 for others.

    Raises:
        TypeError: ``module`` or a task is not an ``nn.Module``, or a weight is not a number.
        ValueError: There is no task, or a weight of an unknown task.

    Example:
        >>> import torch
        >>> from composer.models import ComposerClassifier, ComposerRegressor
        >>> tasks = {"age": ComposerRegressor(nn.Linear(16, 1)), "kind": ComposerClassifier(nn.Linear(16, 3))}
        >>> model = ComposerMultiTask(nn.Linear(8, 16), tasks, weights={"kind": 0.5})
        >>> batch = torch.rand(4, 8), {"age": torch.rand(4), "kind": torch.tensor([0, 1, 2, 0])}
        >>> outputs = model(batch)
        >>> outputs["age"].shape, outputs["kind"].shape, sorted(model.loss(outputs, batch))
        (torch.Size([4, 1]), torch.Size([4, 3]), ['age', 'kind'])
        >>> list(model.get_metrics(is_train=True))
        ['age/MeanAbsoluteError', 'kind/MulticlassAccuracy']
    """

    tasks: Any  # an nn.ModuleDict, whose items mypy takes for plain modules

    def __init__(
        self, module: nn.Module, tasks: Mapping[str, PairModel], weights: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        tasks, weights = dict(tasks), dict(weights or {})
        check_modules(module=module)
        check_modules(**{f"tasks[{name!r}]": task for name, task in tasks.items()})
        check_numbers(**weights)
        if not tasks or not weights.keys() <= tasks.keys():
            raise ValueError(
                f"tasks must have a model for each task, and weights the weights of some of them, got the tasks "
                f"{list(tasks)} and the weights {list(weights)}. Name both as in the dictionary of targets."
            )
        self.module, self.tasks = module, nn.ModuleDict(tasks)
        for task in tasks.values():  # the same metrics may have been passed to several
            task.train_metrics, task.val_metrics = copy.deepcopy((task.train_metrics, task.val_metrics))
        self.weights = {name: weights.get(name, 1.0) for name in tasks}
        self._unchecked = _CHECKED_PARTS

    def forward(self, batch: Any) -> dict[str, Any]:
        """Compute the outputs of each head.

        Args:
            batch: A pair ``(input, targets)``; or without targets the input tensor, or ``(input,)``.

        Returns:
            The outputs by task.

        Raises:
            TypeError: ``batch`` is none of these.
        """
        is_alone = isinstance(batch, (tuple, list)) and len(batch) == 1
        features = self.module(batch if isinstance(batch, Tensor) else batch[0] if is_alone else self._pair(batch)[0])
        has_outputs = isinstance(features, Mapping) and self.tasks.keys() <= features.keys()
        return {name: task((features[name] if has_outputs else features,)) for name, task in self.tasks.items()}

    def loss(self, outputs: Mapping[str, Any], batch: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Compute the weighted loss of each task, given the batch's targets.

        Args:
            outputs: Outputs by task.
            batch: A pair ``(input, targets)``.
            args: Passed to the loss of each task.
            kwargs: Passed to the loss of each task.

        Returns:
            Scalars by task, whose sum is minimised.

        Raises:
            TypeError: ``batch`` is not a pair, or its targets are no dictionary.
            ValueError: There is no target of a task, or one that does not fit.
        """
        return {
            name: self.weights[name] * task.loss(outputs[name], self._pair_of(name, batch), *args, **kwargs)
            for name, task in self.tasks.items()
        }

    def count_loss_terms(self, batch: Any) -> None:
        """Warn once, in one of the first parts of batches, if the loss of a task is no mean over samples.

        Args:
            batch: A pair ``(input, targets)``.

        Returns:
            None: losses are weighted by samples, as there is one weight for all tasks.
        """
        for name, task in self.tasks.items() if self.training and self._unchecked else ():
            _, target = pair = self._pair_of(name, batch)
            terms = task.count_loss_terms(pair) if isinstance(target, Tensor) else None
            if terms is not None and float(terms) not in {target.numel(), len(target)}:  # the host waits for a device
                self._unchecked = 1
                warnings.warn(
                    f"Microbatches and processes do not give the step of the batch: the loss of the task {name!r} is "
                    "no mean over samples, as targets are ignored or classes have weights. Sums are exact: set "
                    "reduction='sum' in the loss_fn of each task, and weights= of ComposerMultiTask.",
                    stacklevel=2,
                )
                break
        self._unchecked = max(0, self._unchecked - 1)

    @property
    def loss_is_sum(self) -> bool:
        """Whether the losses of all tasks are sums over samples."""
        return all(task.loss_is_sum for task in self.tasks.values())

    @property
    def loss_needs_whole_batch(self) -> bool:
        """Whether the loss of a task compares samples, or only some of the losses are sums over samples."""
        sums = {task.loss_is_sum for task in self.tasks.values()}
        return len(sums) > 1 or any(task.loss_needs_whole_batch for task in self.tasks.values())

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Return the metrics of a phase.

        Args:
            is_train: Whether to return the metrics of training or of evaluation.

        Returns:
            Metrics by task and name, such as ``"age/MeanAbsoluteError"``.
        """
        found = {}
        for name, task in self.tasks.items():
            for kind, metric in task.get_metrics(is_train).items():
                vars(metric)[_TASK] = name
                found[f"{name}/{kind}"] = metric
        return found

    def update_metric(self, batch: Any, outputs: Mapping[str, Any], metric: Metric) -> None:
        """Update a metric of :meth:`get_metrics` with one batch.

        Args:
            batch: A pair ``(input, targets)``.
            outputs: Outputs by task.
            metric: The metric, which is updated with the outputs and targets of its task.

        Raises:
            TypeError: ``batch`` is not a pair, or its targets are no dictionary.
            ValueError: The metric belongs to no task, or a target does not fit.
        """
        name = vars(metric).get(_TASK, "")
        if name not in self.tasks:
            raise ValueError(
                f"{type(metric).__name__} belongs to none of the tasks {list(self.tasks)}. Pass it to the model of its "
                "task, as in ComposerRegressor(head, val_metrics=...)."
            )
        self.tasks[name].update_metric(self._pair_of(name, batch), outputs[name], metric)

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        return pair_of(batch, type(self).__name__, "(input, targets)")

    def _pair_of(self, name: str, batch: Any) -> tuple[Any, Any]:
        """Return the input, and the target of a task."""
        input, targets = self._pair(batch)
        if not isinstance(targets, Mapping) or name not in targets:
            got = f"the targets {list(targets)}" if isinstance(targets, Mapping) else type(targets).__name__
            kind = ValueError if isinstance(targets, Mapping) else TypeError
            raise kind(
                f"targets must be a dictionary with the tasks {list(self.tasks)}, got {got}. A data set with samples "
                "(input, {name: target, ...}) has such batches."
            )
        return input, targets[name]

"""Metrics of scores and targets: means over all targets, whatever the split into batches, and the F1 score."""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import Metric
from torchmetrics.classification import BinaryF1Score as TorchBinaryF1Score
from torchmetrics.classification import MulticlassAccuracy as TorchMulticlassAccuracy

from composer.functional.checks import check_callables
from composer.loss._calling import call_loss, count_terms, in_float32, is_sum, keep_settings


class _Mean(Metric, ABC):
    """Base of metrics that are a mean: a sum and a count, which are divided at the end.

    A mean of batch means would give too much weight to the values of a small last batch, or of a batch with many
    ignored targets. Subclasses call :meth:`add` in ``update``.

    Args:
        ignore_index: The class id of targets that do not count.
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    loss_sum: Tensor
    loss_rest: Tensor
    count: Tensor

    def __init__(self, ignore_index: int = -100, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.ignore_index = ignore_index
        self.add_state("loss_sum", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("loss_rest", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def add(self, total: Tensor, count: Tensor | int) -> None:
        """Add the sum of ``count`` values."""
        self.loss_sum, lost = _add_exactly(self.loss_sum, total)
        self.loss_rest = self.loss_rest + lost
        self.count = self.count + count

    def add_cross_entropy(self, logits: Tensor, ids: Tensor) -> None:
        """Add the cross entropies of logits ``(N, C, ...)`` and those of the class ids ``(N, ...)`` that count."""
        batch_sum = cross_entropy(logits.float(), ids, ignore_index=self.ignore_index, reduction="sum")
        self.add(batch_sum, (ids != self.ignore_index).sum())

    def total(self) -> Tensor:
        """Return the sum of all values that count, a scalar."""
        return self.loss_sum + self.loss_rest.nan_to_num()  # after an infinite loss the rest is nan

    def compute(self) -> Tensor:
        """Return the mean over all values that count, a scalar; ``nan`` if there are none."""
        return self.total() / self.count


class CrossEntropy(_Mean):
    """The cross entropy, averaged over all targets, whatever the split into batches.

    Sums and counts are accumulated separately until ``compute()``, in each process and across processes.

    Args:
        ignore_index: The class id of targets that do not count.
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.

    Example:
        >>> import torch
        >>> metric = CrossEntropy()
        >>> metric.update(torch.zeros(3, 2), torch.tensor([0, 1, -100]))
        >>> metric.compute()
        tensor(0.6931)
    """

    def update(self, preds: Tensor, targets: Tensor) -> None:
        """Add a batch.

        Args:
            preds: Logits, shape ``(N, C, ...)``.
            targets: Class ids ``(N, ...)``, any integer dtype; or class probabilities ``(N, C, ...)``, of which rows of
                zeros do not count.

        Raises:
            ValueError: The shapes do not match.
        """
        if targets.is_floating_point() or targets.shape == preds.shape:
            # A row of zeros is an ignored label, as smooth_labels encodes it.
            batch_sum = cross_entropy(preds.float(), targets.float(), reduction="sum")
            self.add(batch_sum, targets.sum(1).count_nonzero())
        else:
            self.add_cross_entropy(preds, targets.long())


class MulticlassAccuracy(TorchMulticlassAccuracy):
    """That of torchmetrics over all targets, for which the host does not wait for the device, also if some are ignored.

    Args:
        num_classes: The number of classes.
        ignore_index: The class id of targets that do not count.

    Example:
        >>> metric = MulticlassAccuracy(2, ignore_index=-100)
        >>> metric.update(torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), torch.tensor([1, 1, -100]))
        >>> metric.compute()
        tensor(0.5000)
    """

    ignore_index: int
    tp: Tensor
    fn: Tensor

    def __init__(self, num_classes: int, ignore_index: int) -> None:
        super().__init__(num_classes, average="micro", ignore_index=ignore_index, validate_args=False)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch.

        Args:
            preds: Scores ``(N, C, ...)``, or class ids ``(N, ...)``.
            target: Class ids ``(N, ...)``.
        """
        ids = preds.argmax(1) if preds.is_floating_point() else preds
        counts = target.ne(self.ignore_index)
        right = ((ids == target) & counts).sum()
        self.tp.add_(right)  # assigning to a module takes longer
        self.fn.add_(counts.sum() - right)


def _state(name: str, doc: str) -> Any:
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value), doc=doc)


class _TokenMean(_Mean):
    """Base of metrics of the mean loss per token; subclasses may replace ``loss_fn``, and add to the two states."""

    sum_loss = _state("loss_sum", "The sum of the losses, for subclasses that compute them.")
    total_items = _state("count", "The number of tokens that count.")

    def __init__(
        self, dist_sync_on_step: bool = False, ignore_index: int = -100, *, vocab_size: int | None = None
    ) -> None:
        super().__init__(ignore_index, dist_sync_on_step)
        self.loss_fn: Callable[..., Tensor] = partial(cross_entropy, ignore_index=ignore_index, reduction="sum")
        if vocab_size is not None:
            warnings.warn(
                f"vocab_size is ignored: {type(self).__name__} reads it from the logits. Omit it.",
                DeprecationWarning,
                stacklevel=2,
            )

    def update(self, output: Tensor | Mapping[str, Any], target: Tensor) -> None:
        """Add a batch.

        Args:
            output: Logits ``(..., V)``, for instance ``(N, L, V)``; or a model's output with these ``"logits"``.
            target: Token ids ``(...)``.

        Raises:
            KeyError: ``output`` is a mapping without logits.
            ValueError: The shapes do not match.
        """
        logits, ids = _flat_logits_and_targets(output, target)
        self.add(self.loss_fn(logits.float(), ids), (ids != self.ignore_index).sum())


class LanguageCrossEntropy(_TokenMean):
    """The cross entropy in nats per token, averaged over all tokens, whatever the split into batches.

    Args:
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.
        ignore_index: The id of tokens that do not count, such as padding and tokens that are not masked.
        vocab_size: Ignored, with a ``DeprecationWarning``.

    Example:
        >>> import torch
        >>> metric = LanguageCrossEntropy()
        >>> metric.update(torch.zeros(2, 3, 10), torch.tensor([[1, 5, -100], [7, -100, -100]]))
        >>> metric.compute()
        tensor(2.3026)
    """


class LanguagePerplexity(_TokenMean):
    """The perplexity: ``exp`` of the mean cross entropy over all tokens, whatever the split into batches.

    Args:
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.
        ignore_index: The id of tokens that do not count, such as padding and tokens that are not masked.
        vocab_size: Ignored, with a ``DeprecationWarning``.

    Example:
        >>> import torch
        >>> metric = LanguagePerplexity()
        >>> metric.update(torch.zeros(2, 3, 10), torch.tensor([[1, 5, -100], [7, -100, -100]]))
        >>> round(metric.compute().item(), 3)
        10.0
    """

    def compute(self) -> Tensor:
        """Return the perplexity, a scalar; ``nan`` if no token counts."""
        return super().compute().exp()


class MaskedAccuracy(_Mean):
    """The fraction of targets whose class has the highest score; masked targets do not count.

    Args:
        ignore_index: The class id of masked targets.
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.

    Example:
        >>> import torch
        >>> metric = MaskedAccuracy()
        >>> metric.update(torch.eye(4), torch.tensor([0, 1, 0, -100]))
        >>> metric.compute()
        tensor(0.6667)
    """

    higher_is_better = True

    def update(self, preds: Tensor | Mapping[str, Any], target: Tensor) -> None:
        """Add a batch.

        Args:
            preds: Scores ``(..., C)``; or, if only this shape fits the targets, ``(N, C, ...)``; or a model's output
                with these ``"logits"``.
            target: Class ids ``(...)``.

        Raises:
            KeyError: ``preds`` is a mapping without logits.
            ValueError: The shapes do not match.
        """
        logits, ids = _flat_logits_and_targets(preds, target)
        counts = ids != self.ignore_index
        self.add(((logits.argmax(dim=1) == ids) & counts).sum(), counts.sum())


class LossMetric(_Mean):
    """The mean of a loss function over all samples, or its sum if it is one, whatever the split into batches.

    Args:
        loss_function: Called as ``loss_function(preds, targets)``. Returns the mean over the samples, which is then
            weighted by their number; or a value for each sample, as with ``reduction="none"``. torch's cross entropy
            and negative log-likelihood are weighted by the labels that are not ignored, and by the weights of their
            classes. The values of a loss with the setting ``reduction="sum"`` are added. A loss of torch that takes
            floats, such as ``nn.BCEWithLogitsLoss``, gets integers of the shape of ``preds`` as such.
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.

    Raises:
        TypeError: ``loss_function`` is not callable.

    Example:
        >>> import torch
        >>> metric = LossMetric(torch.nn.functional.mse_loss)
        >>> metric.update(torch.zeros(3), torch.ones(3))
        >>> metric.update(torch.zeros(1), torch.full((1,), 3.0))
        >>> metric.compute()
        tensor(3.)
    """

    def __init__(self, loss_function: Callable[[Any, Any], Tensor], dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        check_callables(loss_function=loss_function)
        keep_settings(loss_function)
        self.loss_function = loss_function

    def update(self, preds: Any, targets: Any) -> None:
        """Add a batch.

        Args:
            preds: The first argument of the loss function, converted to float32 from 16 bits.
            targets: The second argument. The first dimension of one of the two is the number of samples.

        Raises:
            TypeError: The loss is a mean, and neither argument is a tensor with a first dimension.
        """
        preds = in_float32(preds) if isinstance(preds, Tensor) else preds
        loss = call_loss(self.loss_function, preds, targets).detach().float()
        if loss.ndim:
            self.add(loss.sum(), loss.numel())
        elif is_sum(self.loss_function):
            self.add(loss, 1)
        elif (terms := count_terms(self.loss_function, targets)) is not None:
            self.add(torch.where(terms == 0, 0, loss * terms), terms)
        elif num_samples := _num_samples(preds, targets):
            self.add(loss * num_samples, num_samples)

    def compute(self) -> Tensor:
        """Return the mean, ``nan`` if there are no samples, or the sum of a loss that is one: a scalar."""
        return self.total() if is_sum(self.loss_function) else super().compute()


class BinaryF1Score(TorchBinaryF1Score):
    """torchmetrics' F1 score of class 1 for models that return logits, two or one per sample.

    torchmetrics infers from the values whether they are probabilities or logits. Here they are logits: with two, the
    class of the higher one is predicted; with one, class 1 is predicted where it is positive.

    Args:
        dist_sync_on_step: Gather over all processes at every ``forward`` of the metric, not only at ``compute``.

    Example:
        >>> import torch
        >>> metric = BinaryF1Score()
        >>> metric.update(torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 3.0]]), torch.tensor([1, 1, 0]))
        >>> metric.compute()
        tensor(0.5000)
    """

    def __init__(self, dist_sync_on_step: bool = False) -> None:
        # Validating values would synchronise with the device at every batch.
        super().__init__(ignore_index=-100, validate_args=False, dist_sync_on_step=dist_sync_on_step)

    def update(self, output: Tensor | Mapping[str, Any], target: Tensor) -> None:
        """Add a batch.

        Args:
            output: Logits ``(N, 2)``, ``(N, 1)`` or ``(N,)``; or a model's output with these ``"logits"``.
            target: Classes ``(N,)``: 0 or 1; -100 does not count.

        Raises:
            KeyError: ``output`` is a mapping without logits.
            ValueError: The shapes do not match.
        """
        logits = _logits_of(output)
        if target.ndim != 1 or tuple(logits.shape) not in {(len(target), 2), (len(target), 1), (len(target),)}:
            raise ValueError(
                "BinaryF1Score takes logits (N, 2), (N, 1) or (N,) with targets (N,), "
                f"got {tuple(logits.shape)} with {tuple(target.shape)}."
            )
        is_pair = logits.ndim == 2 and logits.shape[1] == 2
        guesses = logits.argmax(dim=1) if is_pair else logits.reshape(len(target)) > 0
        super().update(guesses.long(), target)


def _logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output, a mapping with ``"logits"`` or the logits themselves.

    Raises:
        KeyError: The output is a mapping without logits.
    """
    if not isinstance(output, Mapping):
        return output  # type: ignore[no-any-return]
    if "logits" not in output:
        raise KeyError(f"A model's output must have 'logits' for this metric, got {sorted(map(str, output))}.")
    return output["logits"]  # type: ignore[no-any-return]


def _flat_logits_and_targets(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits ``(M, C)`` and class ids ``(M,)`` of a model's output for ``M`` targets.

    The classes are the last dimension, as in language models, or else the second, as in models of images.

    Raises:
        ValueError: The shapes do not match.
    """
    logits = _logits_of(output)
    if logits.ndim == target.ndim + 1 and logits.ndim >= 2:
        if logits.shape[:-1] == target.shape:
            return logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
        if (logits.shape[0], *logits.shape[2:]) == target.shape:
            return logits.movedim(1, -1).reshape(-1, logits.shape[1]), target.reshape(-1)
    raise ValueError(
        "The logits must have one dimension more than the targets, that of the classes: (..., C) for targets (...), "
        f"got {tuple(logits.shape)} for {tuple(target.shape)}."
    )


def _add_exactly(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded sum and the rounding error (Knuth's two-sum).

    After a million batches a plain sum in single precision is wrong in the fifth digit, and some devices have no double
    precision.
    """
    # The loss of each batch is much smaller than the sum: `lost` has the digits that the sum cannot represent.
    total = a + b
    b_seen = total - a
    return total, (a - (total - b_seen)) + (b - b_seen)


def _num_samples(preds: Any, targets: Any) -> int:
    for batch in (targets, preds):
        if isinstance(batch, Tensor) and batch.ndim:
            return len(batch)
    raise TypeError(
        "The samples of a mean loss are counted in preds or targets, and neither is a tensor, got "
        f"{type(preds).__name__} and {type(targets).__name__}. Let loss_function return a value for each sample."
    )

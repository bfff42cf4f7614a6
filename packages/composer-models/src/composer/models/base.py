"""The interface between a model and a trainer."""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map, tree_map_only

from composer.functional import soft_cross_entropy
from composer.functional.nested import sizes
from composer.loss._calling import as_function, call_loss, count_terms, is_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchmetrics import Metric

    from composer.metrics import ModelLoss

_SIGNATURES = {"forward": "forward(self, batch)", "loss": "loss(self, outputs, batch)"}


class ComposerModel(nn.Module, ABC):
    """A module with a forward pass, a loss and metrics for batches.

    Every method takes the batch as the dataloader yields it, so a dataset may have any structure. Forward pass and loss
    are two methods, because algorithms run between them: label smoothing changes the targets when the outputs are
    known, MixUp computes the loss a second time.

    Subclasses define :meth:`forward` and :meth:`loss`, and for metrics :meth:`get_metrics` and :meth:`update_metric`.

    A trainer needs the methods, not the class: it accepts any ``nn.Module`` that has them.

    Attributes:
        logger: The logger of the trainer, to log from :meth:`forward` and :meth:`loss`; None without one. Copies of the
            model have none.

    Raises:
        TypeError: The subclass lacks ``forward`` or ``loss``, or its ``__init__`` does not call ``super().__init__()``.

    Example:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> class Line(ComposerModel):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.model = torch.nn.Linear(1, 1)
        ...     def forward(self, batch):
        ...         x, _ = batch
        ...         return self.model(x)
        ...     def loss(self, outputs, batch):
        ...         _, y = batch
        ...         return F.mse_loss(outputs, y)
        >>> model, batch = Line(), (torch.zeros(4, 1), torch.ones(4, 1))
        >>> model.loss(model(batch), batch).shape
        torch.Size([])
    """

    logger: Any = None
    _label_smoothing: float = 0.0

    def __new__(cls, *_args: object, **_kwargs: object) -> Self:
        """Raise a TypeError for a class without ``forward`` or ``loss``."""
        missing = sorted(cls.__abstractmethods__)
        if missing:
            signatures = " and ".join(_SIGNATURES.get(name, name) for name in missing)
            raise TypeError(f"{cls.__name__} cannot be trained before it defines {signatures}.")
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Report a missing ``super().__init__()`` in an error with the class name."""
        super().__init_subclass__(**kwargs)
        own_init = cls.__dict__.get("__init__")
        if own_init is not None:
            cls.__init__ = _checked_init(own_init)  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled: everything but the logger, which refers to the run."""
        return {name: value for name, value in self.__dict__.items() if name != "logger"}

    @abstractmethod
    def forward(self, batch: Any) -> Any:
        """Compute the outputs for a batch.

        Args:
            batch: A batch of the dataloader, on the model's device.

        Returns:
            Outputs, in the form that :meth:`loss` and :meth:`update_metric` expect.
        """

    @abstractmethod
    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss.

        Algorithms and metrics read the batch afterwards, and algorithms may compute the loss again: do not change its
        tensors in place. Nothing checks this, as it would take time in each step.

        Args:
            outputs: The result of :meth:`forward`.
            batch: The batch of these outputs.
            args: Further arguments of the subclass.
            kwargs: Further keyword arguments of the subclass.

        Returns:
            A scalar tensor; or several, in a sequence or a mapping, whose sum is minimised.
        """

    def count_loss_terms(self, batch: Any) -> Tensor | None:
        """Count the elements that the loss of a batch is the mean of.

        By this count a trainer weighs the losses of microbatches and processes, so that any split of a batch gives the
        same step. Override it if the loss is a mean over anything but samples, such as tokens with a label.

        Args:
            batch: A batch of the dataloader, on the model's device.

        Returns:
            A tensor of one number on the device, which is not waited for; None for samples, the default.
        """
        return None

    @property
    def loss_is_sum(self) -> bool:
        """Whether :meth:`loss` is a sum over samples: if the ``reduction`` of the ``loss_fn`` of a wrapper states so.

        A trainer adds the sums of microbatches and processes without counting elements, so that any split of a batch
        gives the same step. Set ``loss_is_sum = True`` in the class of a model with such a loss of its own.
        """
        return self._has_known_loss() and is_sum(getattr(self, "loss_fn", None))

    @property
    def loss_needs_whole_batch(self) -> bool:
        """Whether the losses of microbatches do not add up to that of the batch: if the ``loss_fn`` has this attribute.

        So it is if samples are compared with each other, as in a contrastive loss, or if the loss adds means over
        different elements. A trainer warns before it splits a batch, and does not split it by itself. Set
        ``loss_needs_whole_batch = True`` in the class of a model or of a ``loss_fn``.
        """
        return bool(getattr(getattr(self, "loss_fn", None), "loss_needs_whole_batch", False))

    @property
    def loss_ignore_index(self) -> int:
        """The class id that :meth:`loss` ignores: the ``ignore_index`` of a loss of torch in ``loss_fn``, or else -100.

        MixUp and CutMix encode it as a row of zeros, which does not count.
        """
        ignored: int = as_function(getattr(self, "loss_fn", None))[1].get("ignore_index", -100)
        return ignored

    @property
    def loss_label_smoothing(self) -> float | None:
        """The part of each label that :meth:`loss` distributes over all classes, 0 by default.

        The algorithm LabelSmoothing sets it for the time of a loss. If it is None, :meth:`loss` cannot smooth labels,
        and the algorithm changes those of the batch to probabilities.
        """
        return self._label_smoothing if self._has_known_loss() and self._smooths_labels() else None

    @loss_label_smoothing.setter
    def loss_label_smoothing(self, smoothing: float) -> None:
        self.__dict__["_label_smoothing"] = smoothing  # in each step: nn.Module would look what it is

    def _smooths_labels(self) -> bool:
        """Return whether the loss of a wrapper is a cross entropy, which smooths labels by ``_label_smoothing``."""
        return known_cross_entropy(getattr(self, "loss_fn", None)) is not None

    def _has_known_loss(self) -> bool:
        """Return whether :meth:`loss` is that of a wrapper of this library, and not of a class of the user's own."""
        return type(self).loss.__module__.startswith("composer.models.")

    def eval_forward(self, batch: Any, outputs: Any | None = None) -> Any:
        """Compute the outputs that metrics are updated with.

        Override it if evaluation differs from training, for instance to generate text.

        Args:
            batch: A batch of the dataloader, on the model's device.
            outputs: The result of :meth:`forward` for this batch, if it has been computed already.

        Returns:
            ``outputs`` if given, else ``self(batch)``.
        """
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> Mapping[str, Metric]:
        """Return the metrics to compute: by default none in training, and the loss in evaluation.

        The loss, :class:`composer.metrics.ModelLoss`, is the metric ``"loss"``, as in ``save_best="eval/loss"``. An own
        :meth:`get_metrics` may add it by ``{**super().get_metrics(is_train), ...}``, if :meth:`update_metric` calls
        this class's for it. A model with its own :meth:`eval_forward` has none.

        Args:
            is_train: Whether the metrics are for training or for evaluation.

        Returns:
            Metrics by the name under which they are logged.
        """
        kind = type(self)
        updates_others = kind.update_metric is not ComposerModel.update_metric
        if is_train or kind.eval_forward is not ComposerModel.eval_forward:
            return {}
        if updates_others and kind.get_metrics is ComposerModel.get_metrics:
            return {}
        from composer.metrics import ModelLoss  # noqa: PLC0415 (imports torchmetrics, which takes a second)

        return {"loss": ModelLoss()}

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> Any:
        """Update a metric with one batch.

        Args:
            batch: A batch of the dataloader.
            outputs: The result of :meth:`eval_forward` for it.
            metric: A metric from :meth:`get_metrics`, or of an evaluator.

        Returns:
            None, or a dictionary, which callbacks of an evaluation find in ``state.metric_outputs``.

        Raises:
            NotImplementedError: The subclass does not define it, and the metric is not the loss of the model.
            ValueError: The samples that the loss is the mean of cannot be counted.
        """
        from composer.metrics import ModelLoss  # noqa: PLC0415 (imports torchmetrics, which is imported by now)

        if isinstance(metric, ModelLoss):
            # Those of 16-bit autocast have the weights' dtype, as the loss is computed here outside of autocast.
            wide = next((one.dtype for one in self.parameters() if one.is_floating_point()), torch.float32)
            outputs = tree_map_only(
                Tensor,
                lambda one: one.to(torch.promote_types(one.dtype, wide)) if one.is_floating_point() else one,
                outputs,
            )
            return self._update_loss(batch, outputs, metric)
        raise NotImplementedError(
            f"{type(self).__name__} has to define update_metric(self, batch, outputs, metric) before "
            f"{type(metric).__name__} can be computed; usually that is metric.update(outputs, targets)."
        )

    def _update_loss(self, batch: Any, outputs: Any, metric: ModelLoss) -> None:
        """Update the loss as a metric with the outputs of a batch."""
        loss, terms = self.loss(outputs, batch), self.count_loss_terms(batch)
        count = self._count_samples(batch) if terms is None else terms
        metric.update(tree_map(lambda part: part / count, loss) if self.loss_is_sum else loss, count)

    def _count_samples(self, batch: Any) -> int:
        """Return the number of samples of a batch: the length of its tensors."""
        lengths = set(sizes(batch))
        if len(lengths) != 1:
            raise ValueError(
                f"The loss of {type(self).__name__} is averaged over samples, which cannot be counted in its batches: "
                f"their parts have the lengths {sorted(lengths)}. Define count_loss_terms(self, batch)."
            )
        return lengths.pop()


def pair_of(batch: Any, model: str, expected: str, remedy: str | None = None) -> tuple[Any, Any]:
    """Return both parts of a batch, or raise a TypeError with what the model expects."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise TypeError(wrong_batch(batch, model, expected, remedy))


def wrong_batch(batch: Any, model: str, expected: str, remedy: str | None = None) -> str:
    """Return the sentences of an error for a batch that a model does not take."""
    got = type(batch).__name__
    if isinstance(batch, (tuple, list)):
        got = f"{got} of {len(batch)}"
    elif isinstance(batch, Mapping):
        got = f"{got} with keys {sorted(map(str, batch))}"
    default = "For other batches derive from ComposerModel, whose forward and loss unpack the batch themselves."
    return f"{model} takes batches {expected}, got {got}. {remedy or default}"


def compute_loss(
    loss_fn: Callable[..., Tensor],
    scores: Tensor,
    target: Tensor,
    *args: Any,
    remedy: str = ".",
    has_binary_default: bool = False,
    smoothing: float = 0.0,
    **kwargs: Any,
) -> Tensor:
    """Call a loss, and raise an error with the remedy if a class id has no score, or shapes differ.

    A cross entropy of ignored targets only is 0.
    """
    is_default = loss_fn is soft_cross_entropy  # in each step, without a look at what another loss is
    if is_default and smoothing:
        kwargs = {"label_smoothing": smoothing, **kwargs}
    elif not is_default and (smoothing or (isinstance(target, Tensor) and target.is_floating_point())):
        loss_fn = known_cross_entropy(loss_fn, smoothing) or loss_fn
    try:
        call = loss_fn if is_default else functools.partial(call_loss, loss_fn)
        loss = call(scores, target, *args, **kwargs)
    except (IndexError, ValueError) as error:
        cause = error.__cause__ or error  # soft_cross_entropy raises a ValueError from torch's error
        # As in errors of torch's losses, of which a binary cross entropy has the second form; others are unrelated.
        if not str(cause).startswith(("Target ", "Using a target size")):
            raise
        shape = tuple(scores.shape)
        differs = " size" in str(cause)
        if has_binary_default and (scores.ndim == 1 or shape[1] == 1):
            remedy = "Omit loss_fn, as one score has the binary cross entropy by default"
            remedy += f", or return scores of shape {tuple(target.shape)}." if differs else "."
        elif differs:
            remedy = f"This loss takes targets of shape {shape}. Omit loss_fn for class ids."
        else:
            remedy = f"Class ids run from 0 to {shape[1] - 1}{remedy}"
        raise ValueError(f"The target does not fit the scores of shape {shape}: {cause} {remedy}") from error
    if not is_default or target.dtype.is_floating_point:
        return zero_without_terms(loss, lambda: count_terms(loss_fn, target))
    return zero_without_terms(loss, lambda: target.eq(-100).all(), of_ids=True)


def zero_without_terms(loss: Tensor, count: Callable[[], Tensor | None], *, of_ids: bool = False) -> Tensor:
    """Return a mean over terms, and 0 instead of NaN if there is none; its gradients are 0 then, too.

    The terms are counted if they may be needed: a mean in the memory of the CPU is read first, which takes less
    time than an operation. Reading one on another device would wait until the device has computed it. With ``of_ids``
    the loss is torch's cross entropy of class ids, and ``count`` returns whether none counts: ignored ids have
    gradients of 0 in any case, so that only the value is replaced, in place and without a backward pass.
    """
    is_plain = type(loss) is Tensor and not torch.compiler.is_compiling()
    if is_plain and loss.is_cpu and (loss.ndim > 0 or not math.isnan(loss.item())):
        return loss
    terms = count()
    if of_ids and terms is not None:
        if not is_plain:
            return loss.masked_fill(terms, 0.0)
        loss.detach().masked_fill_(terms, 0.0)
        return loss
    return loss if terms is None else loss.where(terms.bool(), 0.0)  # also NaN as the weight of a class stays


def known_cross_entropy(loss_fn: Any, smoothing: float = 0.0) -> Callable[..., Tensor] | None:
    """Return a loss function that is a cross entropy in the form that takes smoothed targets, or None for another.

    Unlike torch's own, it does not count targets of zeros, as algorithms encode ignored class ids.
    """
    function, settings = as_function(loss_fn)
    if function not in (cross_entropy, soft_cross_entropy):
        return None
    settings["label_smoothing"] = 1 - (1 - settings.get("label_smoothing", 0.0)) * (1 - smoothing)
    return functools.partial(soft_cross_entropy, **settings)


def _checked_init(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap an ``__init__`` so that it raises a clear error if ``nn.Module.__init__`` has not run."""

    @functools.wraps(init)
    def checked(self: ComposerModel, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            if kwargs and str(error).startswith(f"{init.__qualname__}() got an unexpected"):
                error.add_note(f"Its arguments are {', '.join(list(inspect.signature(init).parameters)[1:])}.")
            raise
        except AttributeError as error:
            if "_modules" in self.__dict__ or not _comes_before_module_init(error):
                raise
        if "_modules" not in self.__dict__:
            name = type(self).__name__
            raise TypeError(f"{name}.__init__ has to call super().__init__() before it sets a layer or returns.")

    return checked


def _comes_before_module_init(error: AttributeError) -> bool:
    """Return whether an AttributeError is caused by a missing call of ``nn.Module.__init__``."""
    message = str(error)
    # Assigning a layer raises torch's own error, reading one an error about an attribute that Module.__init__ sets.
    return "before Module.__init__" in message or any(f"attribute '{name}'" in message for name in vars(nn.Module()))

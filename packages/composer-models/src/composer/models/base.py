"""The interface between a model and whoever trains it."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchmetrics import Metric

__all__ = ["ComposerModel"]

_SIGNATURES = {"forward": "forward(self, batch)", "loss": "loss(self, outputs, batch)"}


class ComposerModel(nn.Module, ABC):
    """A module that knows what to do with a batch.

    Every method is given the batch as the dataloader yields it, so a dataset may have any structure. Forward pass and
    loss are two methods, because algorithms work between them: label smoothing changes the targets once the outputs are
    there, MixUp asks for the loss a second time.

    Define :meth:`forward` and :meth:`loss`. For metrics define :meth:`get_metrics` and :meth:`update_metric` too.

    A trainer needs the methods, not the class: any ``nn.Module`` that has them will do.

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

    def __new__(cls, *_args: object, **_kwargs: object) -> Self:
        """Refuse a class that leaves ``forward`` or ``loss`` open."""
        missing = sorted(cls.__abstractmethods__)
        if missing:
            signatures = " and ".join(_SIGNATURES.get(name, name) for name in missing)
            raise TypeError(f"{cls.__name__} cannot be trained before it defines {signatures}.")
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a forgotten ``super().__init__()`` be reported by name."""
        super().__init_subclass__(**kwargs)
        own_init = cls.__dict__.get("__init__")
        if own_init is not None:
            cls.__init__ = _checked_init(own_init)  # type: ignore[method-assign]

    @abstractmethod
    def forward(self, batch: Any) -> Any:
        """Compute the outputs for a batch.

        Args:
            batch: What the dataloader yields, on the model's device.

        Returns:
            Outputs, in whatever form :meth:`loss` and :meth:`update_metric` expect them.
        """

    @abstractmethod
    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute what is to be minimised.

        Args:
            outputs: What :meth:`forward` returned.
            batch: The batch that it was given.
            args: For loss functions that take more, see the subclass.
            kwargs: The same, by name.

        Returns:
            A scalar tensor; or several, in a sequence or a mapping, whose sum is minimised.
        """

    def eval_forward(self, batch: Any, outputs: Any | None = None) -> Any:
        """Compute the outputs that metrics are updated with.

        Override it where evaluation differs from training, for instance to generate text.

        Args:
            batch: What the dataloader yields, on the model's device.
            outputs: What :meth:`forward` returned for this batch, where that has been computed already.

        Returns:
            ``outputs`` if given, else ``self(batch)``.
        """
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> Mapping[str, Metric]:
        """Name the metrics to compute; none unless overridden.

        Args:
            is_train: Whether they are for training batches or for evaluation.

        Returns:
            Metrics by the name under which they are logged.
        """
        del is_train
        return {}

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Let a metric see one batch.

        Args:
            batch: What the dataloader yields.
            outputs: What :meth:`eval_forward` returned for it.
            metric: One of those from :meth:`get_metrics`, or one that an evaluator brought along.

        Raises:
            NotImplementedError: The subclass did not say how.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has to define update_metric(self, batch, outputs, metric) before "
            f"{type(metric).__name__} can be computed; usually that is metric.update(outputs, targets)."
        )


def _checked_init(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap an ``__init__`` so that it fails with a sentence if ``nn.Module.__init__`` has not run."""

    @functools.wraps(init)
    def checked(self: ComposerModel, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except AttributeError as error:
            if "_modules" in self.__dict__ or not _comes_before_module_init(error):
                raise
        if "_modules" not in self.__dict__:
            name = type(self).__name__
            raise TypeError(f"{name}.__init__ has to call super().__init__() before it sets a layer or returns.")

    return checked


def _comes_before_module_init(error: AttributeError) -> bool:
    """Return whether nn.Module says so, or misses what its ``__init__`` would have made."""
    text = str(error)
    return "before Module.__init__" in text or any(f"attribute '{name}'" in text for name in vars(nn.Module()))

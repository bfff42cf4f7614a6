"""A model whose loss compares the samples of a batch with each other, over all processes and parts of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

from composer.functional import contrastive_loss
from composer.functional.checks import check_modules, check_whole
from composer.functional.dtensors import rank_and_processes
from composer.models.base import ComposerModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchmetrics import Metric


class ComposerContrastive(ComposerModel):
    """A module that maps samples to embeddings, trained so that views of one sample are near each other.

    In training, batches are views ``(N, V, ...)``, V of each sample, or a pair of these and labels ``(N,)``; the
    algorithm ``Augment`` makes them of images, if its module returns several of each. In evaluation and prediction,
    they are samples ``(N, ...)``, or a pair; the outputs are their embeddings ``(N, D)``.

    The loss, :func:`composer.functional.contrastive_loss`, compares each view with those of the samples of all
    processes. The gradient through the embeddings of other processes is exact: the step is that of one process with the
    complete batch, if each process has samples of its own in it. In evaluation, the samples of a batch are compared.

    To save memory, ``microbatch_size`` computes the embeddings of that many samples at a time, and again in the
    backward pass, with the same draws, when the gradient of each embedding is known, as GradCache does
    (arXiv:2101.06983): the loss is that of the complete batch. ``DataSpec(loader, split_batch=model.split_batch)`` lets
    the trainer's ``device_train_microbatch_size`` set it. The trainer's own split would compare the samples of a
    microbatch, of which it warns.

    Args:
        module: Maps samples ``(N, ...)`` to embeddings ``(N, D)``.
        temperature: Similarities are divided by it.
        supervised: Whether samples with one label should be near each other (arXiv:2004.11362); else only the views
            of one sample (arXiv:2002.05709).
        microbatch_size: Number of samples to compute embeddings of at a time; all if None.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``, or ``microbatch_size`` not an integer.
        ValueError: ``microbatch_size`` is less than 1.

    Example:
        >>> model = ComposerContrastive(nn.Linear(8, 4))
        >>> views = torch.rand(16, 2, 8)
        >>> model.loss(model(views), views).shape, model.eval()(views[:, 0]).shape
        (torch.Size([]), torch.Size([16, 4]))
    """

    def __init__(
        self,
        module: nn.Module,
        temperature: float = 0.1,
        *,
        supervised: bool = False,
        microbatch_size: int | None = None,
    ) -> None:
        super().__init__()
        check_modules(module=module)
        self.module, self.temperature, self.supervised = module, temperature, supervised
        self.microbatch_size, self._is_asked_to_split = microbatch_size, False
        if microbatch_size is not None:
            check_whole("microbatch_size", microbatch_size, 1, "It counts samples.")

    @property
    def loss_needs_whole_batch(self) -> bool:
        """Whether a trainer must not split a batch: unless it does so by :meth:`split_batch`."""
        return not self._is_asked_to_split

    def split_batch(self, batch: Any, microbatch_size: int) -> list[Any]:
        """Return the batch as one, whose embeddings are computed for ``microbatch_size`` samples at a time."""
        self.microbatch_size, self._is_asked_to_split = microbatch_size, True
        return [batch]

    def forward(self, batch: Any) -> Tensor:
        """Compute embeddings.

        Args:
            batch: Views ``(N, V, ...)`` in training, else samples ``(N, ...)``; or a pair of these and labels.

        Returns:
            Embeddings of all views, ``(N * V, D)``, those of one sample next to each other; or of samples, ``(N, D)``.

        Raises:
            ValueError: A part of a batch would be normalized by its own samples, by a BatchNorm.
        """
        inputs, number = self._inputs(batch)
        size = self.microbatch_size
        rows = inputs.flatten(0, 1) if self.training else inputs
        if size is None or not (self.training and torch.is_grad_enabled()) or len(inputs) <= size:
            return self.module(rows)  # type: ignore[no-any-return]
        if any(isinstance(layer, _BatchNorm) and layer.training for layer in self.modules()):
            raise ValueError(
                "microbatch_size requires a module without BatchNorm in training, which normalizes by the samples of a "
                "part, got one. Use GroupNorm or LayerNorm, or microbatch_size=None."
            )
        from torch.utils.checkpoint import checkpoint  # noqa: PLC0415  (torch 2.7 imports sympy with it)

        parts = torch.split(rows, size * number)
        return torch.cat([checkpoint(self.module, part, use_reentrant=False) for part in parts])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Compute the contrastive loss of a batch's embeddings.

        Args:
            outputs: The result of :meth:`forward`.
            batch: The batch, with labels if ``supervised``.

        Returns:
            A scalar: the mean over the samples of this process, each compared with those of all; of a single sample in
            evaluation 0.
        """
        number = self._inputs(batch)[1]
        if len(outputs) == 1 and not self.training:
            return 0 * outputs.sum()
        everyone, first = gather_rows(outputs) if self.training else (outputs, 0)
        ids = torch.arange(len(everyone), device=outputs.device) // number
        labels = ids[first : first + len(outputs)]
        if self.supervised:
            labels = batch[1].repeat_interleave(number)
            ids = gather_rows(labels)[0] if self.training else labels
        return contrastive_loss(
            outputs, labels, self.temperature, candidates=everyone, candidate_labels=ids, first=first
        )

    def get_metrics(self, is_train: bool) -> Mapping[str, Metric]:
        """Return the loss in evaluation if ``supervised``; samples with one view and no label have none."""
        return super().get_metrics(is_train) if self.supervised else {}

    def _inputs(self, batch: Any) -> tuple[Tensor, int]:
        """Return the inputs of a batch, and the number of views of each sample."""
        inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
        return inputs, inputs.shape[1] if self.training else 1


def gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all processes by rank, through which gradients pass, and the place of the first own one.

    Processes may have different numbers of rows.

    Example:
        >>> gather_rows(torch.ones(2, 1))
        (tensor([[1.],
                [1.]]), 0)
    """
    rank, num_processes = rank_and_processes()
    if num_processes == 1:
        return rows, 0
    from torch.distributed.nn.functional import all_gather  # noqa: PLC0415  (slow)

    own = torch.tensor([len(rows)], device=rows.device)
    gathered = [torch.empty_like(own) for _ in range(num_processes)]
    distributed.all_gather(gathered, own)
    counts = torch.cat(gathered).tolist()
    padding = rows.new_zeros(max(counts) - len(rows), *rows.shape[1:])
    parts = all_gather(torch.cat([rows, padding]))  # type: ignore[no-untyped-call]
    everyone = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    return everyone, sum(counts[:rank])

"""Batch normalisation with the statistics of parts of a batch (Hoffer et al. 2017, arXiv:1705.08741)."""

from __future__ import annotations

from math import prod
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from composer.functional.checks import check_flags, check_numbers, check_sizes

__all__ = ["GhostBatchNorm1d", "GhostBatchNorm2d", "GhostBatchNorm3d"]


class _GhostBatchNorm(_BatchNorm):
    """What the three have in common. Each is torch's layer too, so that whatever looks for that one finds it."""

    def __init__(
        self,
        num_features: int,
        ghost_batch_size: int = 32,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        **factory: Any,
    ) -> None:
        check_sizes(num_features=num_features)
        check_numbers(eps=eps, momentum=0.1 if momentum is None else momentum)
        if not eps >= 0 or not 0 <= (momentum or 0) <= 1:
            raise ValueError(f"eps must be at least 0, and momentum lie in [0, 1], got {eps} and {momentum}.")
        check_flags(affine=affine, track_running_stats=track_running_stats)
        check_ghost_batch_size(ghost_batch_size)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **factory)
        self.ghost_batch_size = ghost_batch_size

    def forward(self, input: Tensor) -> Tensor:
        """Normalise each ghost batch in training, and as torch's layer does otherwise."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        samples = input.shape[0]
        count = -(-samples // self.ghost_batch_size)
        if not self.training or count < 2:
            output: Tensor = super().forward(input)
            return output
        sizes = [samples // count + (ghost < samples % count) for ghost in range(count)]
        if sizes[-1] * prod(input.shape[2:]) == 1:
            raise ValueError(
                f"ghost_batch_size must give each ghost batch more than one value a channel, got {samples} samples of "
                f"shape {tuple(input.shape[1:])} and {self.ghost_batch_size}. Take a larger one, or another batch size."
            )
        return self._normalize_each(input, sizes)

    def _normalize_each(self, input: Tensor, sizes: list[int]) -> Tensor:
        statistics = self._make_statistics(len(sizes))
        means, variances = ([None] * len(sizes),) * 2 if statistics is None else statistics
        # Every n-th sample as a ghost batch could be normalised by one call, as more channels. That is not faster:
        # ResNet-18, forward and backward of (128, 3, 32, 32) on one thread: plain 0.34 s, this loop 0.35 s, one call
        # 0.38 s; and with the channels last, it would take two copies each way instead of one.
        parts = [
            batch_norm(part, mean, variance, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
            for part, mean, variance in zip(torch.split(input, sizes), means, variances, strict=True)
        ]
        if statistics is not None:
            self._track(statistics, sizes)
        return torch.cat(parts)

    def _make_statistics(self, count: int) -> Tensor | None:
        """Return zeros that each ghost batch's mean and variance replace, if they are tracked."""
        if not self.track_running_stats or self.running_mean is None:
            return None
        return self.running_mean.new_zeros(2, count, self.num_features)

    def _track(self, statistics: Tensor, sizes: list[int]) -> None:
        """Move running mean and variance towards the average over the samples' ghost batches."""
        samples = sum(sizes)
        larger = samples % len(sizes)  # so many have a sample more than the others
        average = statistics[:, larger:].sum(1) * (sizes[-1] / samples)
        if larger:
            average += statistics[:, :larger].sum(1) * (sizes[0] / samples)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        for running, new in zip((self.running_mean, self.running_var), average, strict=True):
            assert running is not None
            if self.momentum is not None:
                running.lerp_(new, self.momentum)
            elif self.num_batches_tracked is not None:
                running.lerp_(new, self.num_batches_tracked.to(running.dtype).reciprocal())

    def extra_repr(self) -> str:
        """Add the size of the ghost batches."""
        settings = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{settings}, ghost_batch_size={self.ghost_batch_size}"

    @classmethod
    def from_batchnorm(cls, module: _BatchNorm, module_index: int, ghost_batch_size: int) -> Self:  # noqa: ARG003
        """Make the layer of torch's: a policy for :func:`replace_module_classes`, once ``ghost_batch_size`` is given.

        Args:
            module: The layer; ``torch.nn.BatchNorm1d`` for :class:`GhostBatchNorm1d`, and so on.
            module_index: Its place among the layers; not used.
            ghost_batch_size: As for the class.

        Returns:
            A layer that holds the parameters and the running statistics themselves.
        """
        new = cls(module.num_features, ghost_batch_size, module.eps, module.momentum, False, False)
        new.affine, new.track_running_stats = module.affine, module.track_running_stats
        for kind in ("_parameters", "_buffers"):
            vars(new)[kind].update(vars(module)[kind])
        new.training = module.training
        return new


class GhostBatchNorm1d(_GhostBatchNorm, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` that sees small batches in training; see :class:`GhostBatchNorm2d` (arXiv:1705.08741).

    Shape: ``(N, C)`` or ``(N, C, L)``, floating point.

    Args:
        num_features: The number of channels ``C``.
        ghost_batch_size: How many samples a ghost batch has at most.
        eps: As for ``torch.nn.BatchNorm1d``, and so on.
        momentum: The weight of a batch's statistics in the running ones; ``None`` averages over all batches.
        affine: Whether there are ``weight`` and ``bias``.
        track_running_stats: Whether there are running statistics.
        **factory: ``device`` and ``dtype``.

    Raises:
        ValueError: ``ghost_batch_size`` is not a whole number of at least 1; when called, if the input's shape does
            not fit, or a ghost batch would have a single value a channel.

    Example:
        >>> GhostBatchNorm1d(4, ghost_batch_size=8)(torch.rand(16, 4)).view(2, 8, 4).mean(1).abs().max() < 1e-5
        tensor(True)
    """


class GhostBatchNorm2d(_GhostBatchNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` that sees small batches in training (arXiv:1705.08741).

    In training the batch is cut, in its order, into as few ghost batches as have at most ``ghost_batch_size`` samples
    each, with sizes that differ by one at most (70 samples by 32: 24, 23 and 23). Each is normalised by its own mean
    and variance. A batch that is not larger than ``ghost_batch_size`` is one ghost batch.

    Running statistics move once a batch, with ``momentum`` as ever, towards the average of the ghost batches' means and
    (unbiased) variances, weighted by their samples. In evaluation the layer is torch's, and so it is without running
    statistics: then a batch to be evaluated is not cut.

    Parameters, buffers and their names are torch's, too: a state dict fits both. Converted by
    ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` it loses its ghosts.

    Shape: ``(N, C, H, W)``, floating point; dtype and memory format are kept.

    Args:
        num_features: The number of channels ``C``.
        ghost_batch_size: How many samples a ghost batch has at most.
        eps: As for ``torch.nn.BatchNorm2d``, and so on.
        momentum: The weight of a batch's statistics in the running ones; ``None`` averages over all batches.
        affine: Whether there are ``weight`` and ``bias``.
        track_running_stats: Whether there are running statistics.
        **factory: ``device`` and ``dtype``.

    Raises:
        ValueError: ``ghost_batch_size`` is not a whole number of at least 1; when called, if the input's shape does
            not fit, or a ghost batch would have a single value a channel.

    Example:
        >>> images = torch.rand(4, 3, 8, 8)
        >>> first, second = GhostBatchNorm2d(3, ghost_batch_size=2)(images).split(2)
        >>> torch.allclose(first, nn.BatchNorm2d(3)(images[:2]), atol=1e-5)
        True
    """


class GhostBatchNorm3d(_GhostBatchNorm, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` that sees small batches in training; see :class:`GhostBatchNorm2d` (arXiv:1705.08741).

    Shape: ``(N, C, D, H, W)``, floating point; dtype and memory format are kept.

    Args:
        num_features: The number of channels ``C``.
        ghost_batch_size: How many samples a ghost batch has at most.
        eps: As for ``torch.nn.BatchNorm3d``, and so on.
        momentum: The weight of a batch's statistics in the running ones; ``None`` averages over all batches.
        affine: Whether there are ``weight`` and ``bias``.
        track_running_stats: Whether there are running statistics.
        **factory: ``device`` and ``dtype``.

    Raises:
        ValueError: ``ghost_batch_size`` is not a whole number of at least 1; when called, if the input's shape does
            not fit, or a ghost batch would have a single value a channel.

    Example:
        >>> GhostBatchNorm3d(2, ghost_batch_size=2)(torch.rand(4, 2, 3, 3, 3)).shape
        torch.Size([4, 2, 3, 3, 3])
    """


def check_ghost_batch_size(ghost_batch_size: int) -> None:
    """Refuse what is not a whole number of at least 1."""
    if not isinstance(ghost_batch_size, int) or isinstance(ghost_batch_size, bool) or ghost_batch_size < 1:
        raise ValueError(
            f"ghost_batch_size must be a whole number of at least 1, got {ghost_batch_size!r}. "
            "It is how many samples are normalised together."
        )

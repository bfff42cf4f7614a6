"""Batch normalisation with the statistics of parts of a batch (Hoffer et al. 2017, arXiv:1705.08741)."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from composer.functional.checks import check_flags, check_interval, check_sizes, check_whole

# One call for all ghost batches copies inputs and outputs. Where each call takes time to begin, that is less; on one
# thread of a CPU, ResNet-18 on (128, 3, 32, 32), forward and backward: plain 0.34 s, in turns 0.35 s, one call 0.38 s.
_IN_TURNS = ("cpu",)  # a tuple, as torch.compile of torch 2.7 does not look into sets
GHOST_BATCH_SIZE = "It is the largest number of samples that are normalised together."


class _GhostBatchNorm(_BatchNorm):
    """The common part of the three layers, each of which also inherits from torch's layer."""

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
        check_interval("eps", eps, 0, math.inf, "It is added to the variance.")
        if momentum is not None:
            check_interval("momentum", momentum, 0, 1, "It is the weight of the new statistics.")
        check_flags(affine=affine, track_running_stats=track_running_stats)
        check_whole("ghost_batch_size", ghost_batch_size, 1, GHOST_BATCH_SIZE)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **factory)
        self.ghost_batch_size = ghost_batch_size

    def acts_on(self, input: Tensor) -> bool:
        """Return whether an input has more than one ghost batch."""
        return len(input) > self.ghost_batch_size

    def forward(self, input: Tensor) -> Tensor:
        """Normalise each ghost batch in training; otherwise compute torch's layer."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        samples = input.shape[0]
        count = -(-samples // self.ghost_batch_size)
        if not self.training or count < 2:
            return super().forward(input)
        sizes = [samples // count + (ghost < samples % count) for ghost in range(count)]
        if sizes[-1] * math.prod(input.shape[2:]) == 1:
            raise ValueError(
                f"ghost_batch_size must give each ghost batch more than one value a channel, got {samples} samples of "
                f"shape {tuple(input.shape[1:])} and {self.ghost_batch_size}. Take a larger one, or another batch size."
            )
        statistics: Tensor | None = None  # zeros, which the mean and variance of each ghost batch replace
        if self.track_running_stats and self.running_mean is not None:
            statistics = self.running_mean.new_zeros(2, count, self.num_features)
        is_one_call = samples % count == 0 and input.device.type not in _IN_TURNS
        output = (self._in_one_call if is_one_call else self._in_turns)(input, sizes, statistics)
        if statistics is not None:
            self._track(statistics, sizes)
        return output

    def _in_turns(self, input: Tensor, sizes: list[int], statistics: Tensor | None) -> Tensor:
        """Normalise one ghost batch after the other."""
        means, variances = ([None] * len(sizes),) * 2 if statistics is None else statistics
        parts = [
            # With momentum 1, the statistics of the ghost batch itself are written to mean and variance.
            batch_norm(part, mean, variance, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
            for part, mean, variance in zip(torch.split(input, sizes), means, variances, strict=True)
        ]
        return torch.cat(parts)

    def _in_one_call(self, input: Tensor, sizes: list[int], statistics: Tensor | None) -> Tensor:
        """Normalise ghost batches of equal sizes as one with more channels: those of each."""
        count, is_last = len(sizes), not input.is_contiguous()
        # Of the format channels_last, which is kept, the channels are the last dimension, and else that after samples.
        parts = torch.unflatten(input.movedim(1, -1) if is_last else input, 0, (count, sizes[0]))
        place = -2 if is_last else 1
        joined = parts.movedim(0, place).flatten(place, place + 1)
        mean, variance = (None, None) if statistics is None else statistics.flatten(1)
        weight, bias = (None if one is None else one.repeat(count) for one in (self.weight, self.bias))
        joined = joined.movedim(-1, 1) if is_last else joined
        output = batch_norm(joined, mean, variance, weight, bias, training=True, momentum=1.0, eps=self.eps)
        output = output.movedim(1, -1) if is_last else output
        parts = torch.unflatten(output, -1 if is_last else 1, (count, self.num_features)).movedim(place, 0)
        return parts.flatten(0, 1).movedim(-1, 1) if is_last else parts.flatten(0, 1)

    def _track(self, statistics: Tensor, sizes: list[int]) -> None:
        """Update running mean and variance with the averages over ghost batches, weighted by their samples."""
        samples = sum(sizes)
        larger = samples % len(sizes)  # the number of ghost batches with one more sample than the others
        average = statistics[:, larger:].sum(1) * (sizes[-1] / samples)
        if larger:
            average += statistics[:, :larger].sum(1) * (sizes[0] / samples)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        # On a CUDA device, autocast computes sum and reciprocal in float32, and lerp_ accepts only one dtype.
        for running, new in zip((self.running_mean, self.running_var), average.to(statistics.dtype), strict=True):
            assert running is not None
            if self.momentum is not None:
                running.lerp_(new, self.momentum)
            elif self.num_batches_tracked is not None:
                running.lerp_(new, self.num_batches_tracked.to(new.dtype).reciprocal().to(new.dtype))

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        settings = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{settings}, ghost_batch_size={self.ghost_batch_size}"

    @classmethod
    def from_batchnorm(cls, module: _BatchNorm, module_index: int, ghost_batch_size: int) -> Self:  # noqa: ARG003
        """Convert torch's layer: a policy for :func:`replace_module_classes` with ``ghost_batch_size`` bound.

        Args:
            module: The layer; ``torch.nn.BatchNorm1d`` for :class:`GhostBatchNorm1d`, and so on.
            module_index: Not used.
            ghost_batch_size: As for the class.

        Returns:
            A layer with the same parameter and buffer objects.
        """
        # Without parameters and buffers of its own, because it takes over those of the layer.
        new = cls(module.num_features, ghost_batch_size, module.eps, module.momentum, False, False)
        new.affine, new.track_running_stats = module.affine, module.track_running_stats
        for kind in ("_parameters", "_buffers"):
            vars(new)[kind].update(vars(module)[kind])
        new.training = module.training
        return new


class GhostBatchNorm1d(_GhostBatchNorm, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` with small batches in training; see :class:`GhostBatchNorm2d` (arXiv:1705.08741).

    Shape: ``(N, C)`` or ``(N, C, L)``, floating point.

    Args:
        num_features: The number of channels ``C``.
        ghost_batch_size: The largest number of samples in a ghost batch.
        eps: As for ``torch.nn.BatchNorm1d``, and so on.
        momentum: The weight of a batch's statistics in the running statistics; ``None`` averages over all batches.
        affine: Whether the layer has ``weight`` and ``bias``.
        track_running_stats: Whether the layer has running statistics.
        **factory: ``device`` and ``dtype``.

    Raises:
        TypeError: ``ghost_batch_size`` is not an int.
        ValueError: ``ghost_batch_size`` is less than 1; when called, the shape of the input does
            not fit, or a ghost batch would have a single value per channel.

    Example:
        >>> GhostBatchNorm1d(4, ghost_batch_size=8)(torch.rand(16, 4)).view(2, 8, 4).mean(1).abs().max() < 1e-5
        tensor(True)
    """


class GhostBatchNorm2d(_GhostBatchNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` with small batches in training (arXiv:1705.08741).

    In training the batch is split, in order, into the smallest number of ghost batches of at most ``ghost_batch_size``
    samples, whose sizes differ by at most one (70 samples by 32: 24, 23 and 23). Each is normalised by its own mean and
    variance. A batch of at most ``ghost_batch_size`` samples is one ghost batch.

    Running statistics are updated once per batch, with ``momentum``, by the averages of the ghost batches' means and
    (unbiased) variances, weighted by their samples. In evaluation, with or without running statistics, the layer
    computes the same as torch's: the batch is not split.

    Parameters, buffers and their names are those of torch's layer: a state dict fits both.
    ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` converts it to a layer without ghost batches.

    Shape: ``(N, C, H, W)``, floating point; dtype and memory format are kept.

    Args:
        num_features: The number of channels ``C``.
        ghost_batch_size: The largest number of samples in a ghost batch.
        eps: As for ``torch.nn.BatchNorm2d``, and so on.
        momentum: The weight of a batch's statistics in the running statistics; ``None`` averages over all batches.
        affine: Whether the layer has ``weight`` and ``bias``.
        track_running_stats: Whether the layer has running statistics.
        **factory: ``device`` and ``dtype``.

    Raises:
        TypeError: ``ghost_batch_size`` is not an int.
        ValueError: ``ghost_batch_size`` is less than 1; when called, the shape of the input does
            not fit, or a ghost batch would have a single value per channel.

    Example:
        >>> images = torch.rand(4, 3, 8, 8)
        >>> first, second = GhostBatchNorm2d(3, ghost_batch_size=2)(images).split(2)
        >>> torch.allclose(first, nn.BatchNorm2d(3)(images[:2]), atol=1e-5)
        True
    """


class GhostBatchNorm3d(_GhostBatchNorm, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` with small batches in training; see :class:`GhostBatchNorm2d` (arXiv:1705.08741).

    Shape: ``(N, C, D, H, W)``, floating point; dtype and memory format are kept.

    Args:
        num_features: The number of channels ``C``.
        ghost_batch_size: The largest number of samples in a ghost batch.
        eps: As for ``torch.nn.BatchNorm3d``, and so on.
        momentum: The weight of a batch's statistics in the running statistics; ``None`` averages over all batches.
        affine: Whether the layer has ``weight`` and ``bias``.
        track_running_stats: Whether the layer has running statistics.
        **factory: ``device`` and ``dtype``.

    Raises:
        TypeError: ``ghost_batch_size`` is not an int.
        ValueError: ``ghost_batch_size`` is less than 1; when called, the shape of the input does
            not fit, or a ghost batch would have a single value per channel.

    Example:
        >>> GhostBatchNorm3d(2, ghost_batch_size=2)(torch.rand(4, 2, 3, 3, 3)).shape
        torch.Size([4, 2, 3, 3, 3])
    """

"""Dropout with a fixed set of masks (Lee et al., MLSys 2022)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from composer.functional.checks import check_interval, check_whole
from composer.functional.random import hash_words, spread_words


class GyroDropout(nn.Module):
    """Dropout that trains a fixed set of subnetworks, a few at a time (Lee et al., "Gyro Dropout", MLSys 2022).

    ``sigma`` masks are drawn at the start, each of which drops each neuron with probability ``p``. In training ``tau``
    of them are in use: sample ``i`` of ``N`` gets mask ``floor(i * tau / N)``, so each mask applies to an equal part of
    the batch. After ``period = ceil(iters_per_epoch * max_epoch * tau / sigma)`` forward passes the next ``tau`` masks
    follow, so that in the planned training each subnetwork is used for one period; longer training starts again with
    the first masks. Kept values are multiplied by ``1 / (1 - p)``; evaluation is the identity. With fewer than ``tau``
    samples, some masks are not used.

    A neuron is an entry of the last dimension, the same at all positions of a sequence; with four or more dimensions it
    is an entry of dimension 1: a channel of an image, a head of attention weights ``(N, heads, T, T)``.

    The state dict contains ``seed``, which determines the masks, and ``position``, the number of forward passes in
    training; with both, a resumed training uses the same masks. A state dict without them does not change them. Masks
    are not stored: a hash of seed, mask and neuron, which is computed on the device and is the same on each device,
    determines whether a neuron is dropped. So nothing waits for the device, and ``torch.compile`` creates one graph.

    Shape: ``(N, ..., F)`` or ``(N, C, ..., ...)``, floating point; dtype is kept.

    Args:
        iters_per_epoch: Forward passes of training in an epoch, at least 1.
        max_epoch: Epochs of training, at least 1.
        p: Probability of dropping a neuron, in ``[0, 1)``.
        sigma: The number of masks, at least ``tau``.
        tau: The number of masks in use at a time, at least 1.

    Raises:
        ValueError: A number is out of range, or in ``forward`` the input has fewer than two dimensions.

    Example:
        >>> layer = GyroDropout(iters_per_epoch=100, max_epoch=2, p=0.5, sigma=8, tau=2)
        >>> layer.period
        50
        >>> output = layer(torch.ones(4, 6))
        >>> torch.equal(output[0], output[1]), output.unique().tolist()
        (True, [0.0, 2.0])
    """

    seed: Tensor
    position: Tensor

    def __init__(self, iters_per_epoch: int, max_epoch: int, p: float = 0.5, sigma: int = 256, tau: int = 16) -> None:
        super().__init__()
        check_whole(
            "iters_per_epoch", iters_per_epoch, 1, "It is the number of forward passes of training in an epoch."
        )
        check_whole("max_epoch", max_epoch, 1, "It is the number of epochs of training.")
        check_whole("sigma", sigma, meaning="It is the number of all masks.")
        check_whole("tau", tau, 1, "It is the number of masks in use at a time.")
        check_interval("p", p, 0, 1, "It is the probability of dropping a neuron.", open_high=True)
        if sigma < tau:
            raise ValueError(
                f"sigma must be at least tau, got sigma={sigma} and tau={tau}. It is the number of all masks."
            )
        self.iters_per_epoch = iters_per_epoch
        self.max_epoch = max_epoch
        self.p = p
        self.sigma = sigma
        self.tau = tau
        self.inplace = False
        self._last: tuple[int, int, torch.device | None] = (0, 0, None)
        self.period = math.ceil(iters_per_epoch * max_epoch * tau / sigma)
        self.register_buffer("seed", torch.empty((), dtype=torch.int64))
        self.register_buffer("position", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new masks and start with the first; needed after ``to_empty`` of a model created on the meta device."""
        self.seed.copy_(torch.randint(2**32, (), device="cpu"))
        self.position.zero_()

    def forward(self, input: Tensor) -> Tensor:
        """Drop neurons in training, and count the pass."""
        if not self.training:
            return input
        if input.ndim < 2:
            raise ValueError(
                f"input must have shape (N, ..., F), got {tuple(input.shape)}. Each sample of a batch has its own mask."
            )
        neuron_dim = 1 if input.ndim > 3 else input.ndim - 1
        samples, neurons = input.shape[0], input.shape[neuron_dim]
        masks = self._find_masks(self.position, neurons, input.device).to(input.dtype) * (1 / (1 - self.p))
        self.position.add_(1)
        if not torch.compiler.is_exporting():  # torch 2.7 raises an error for an attribute that changes in an export
            self._last = (samples, neurons, input.device)
        shape = [size if dim in {0, neuron_dim} else 1 for dim, size in enumerate(input.shape)]
        return input * masks[self._part(samples, input.device)].view(shape)

    @property
    def dropout_mask(self) -> Tensor:
        """Which neurons the last forward pass in training kept, bool, ``(N, neurons)``; empty before the first."""
        samples, neurons, device = self._last
        return self._find_masks(self.position - 1, neurons, device)[self._part(samples, device)]

    def _part(self, samples: int, device: torch.device | None) -> Tensor:
        """Return which of the masks in use each sample gets, shape ``(samples,)``."""
        return torch.arange(samples, device=device) * self.tau // max(samples, 1)

    def _find_masks(self, position: Tensor, neurons: int, device: torch.device | None) -> Tensor:
        """Return which neurons the masks in use keep in a forward pass, shape ``(tau, neurons)``, bool."""
        numbers = (position // self.period * self.tau + torch.arange(self.tau, device=device)) % self.sigma
        # Hashes are uniform in [0, 2^32): a fraction p of them is below the threshold.
        keys = hash_words(self.seed ^ spread_words(numbers))
        return hash_words(keys[:, None] ^ spread_words(torch.arange(neurons, device=device))) >= int(self.p * 2**32)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, buffer in (("seed", self.seed), ("position", self.position)):
            state_dict.setdefault(prefix + name, buffer)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"p={self.p:g}, sigma={self.sigma}, tau={self.tau}, period={self.period}"

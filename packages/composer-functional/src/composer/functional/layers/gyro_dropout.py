"""Dropout with masks that are chosen once (Lee et al., MLSys 2022)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from composer.functional.checks import check_numbers, check_whole_numbers

__all__ = ["GyroDropout"]


class GyroDropout(nn.Module):
    """Dropout that trains a fixed set of subnetworks, a few at a time (Lee et al., "Gyro Dropout", MLSys 2022).

    ``sigma`` masks are chosen at the start, each neuron dropped with probability ``p``. In training ``tau`` of them are
    in use: sample ``i`` of ``N`` gets the one numbered ``floor(i * tau / N)``, so each has an equal part of the batch.
    After ``period = ceil(iters_per_epoch * max_epoch * tau / sigma)`` forward passes the next ``tau`` follow. So in the
    planned training each subnetwork has one period; longer training begins again with the first. What is kept is
    multiplied by ``1 / (1 - p)``; evaluation changes nothing. With fewer than ``tau`` samples some masks are not used.

    A neuron is an entry of the last dimension, the same at all positions of a sequence; with four dimensions and more,
    one of dimension 1: a channel of an image, a head of attention weights ``(N, heads, T, T)``.

    The state dict holds ``seed``, from which the masks follow, and ``position``, the number of forward passes in
    training; with both, training goes on with the same masks. A state dict without them leaves them as they are.
    Masks are not stored: whether a neuron is dropped is a hash of seed, mask and neuron, worked out on the device and
    the same on each, so that nothing waits and ``torch.compile`` makes one graph.

    Shape: ``(N, ..., F)`` or ``(N, C, ..., ...)``, floating point; dtype is kept.

    Args:
        iters_per_epoch: Forward passes of training in an epoch, at least 1.
        max_epoch: Epochs of training, at least 1.
        p: Probability of dropping a neuron, at least 0 and below 1.
        sigma: The number of masks, at least ``tau``.
        tau: The number of masks in use at a time, at least 1.

    Raises:
        ValueError: A number is not as above, or in ``forward`` the input has fewer than two dimensions.

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
        _check_settings(iters_per_epoch, max_epoch, p, sigma, tau)
        self.iters_per_epoch = iters_per_epoch
        self.max_epoch = max_epoch
        self.p = p
        self.sigma = sigma
        self.tau = tau
        self.inplace = False
        self.period = math.ceil(iters_per_epoch * max_epoch * tau / sigma)
        self.register_buffer("seed", torch.empty((), dtype=torch.int64))
        self.register_buffer("position", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Choose other masks and begin with the first; needed after ``to_empty`` of a model made on the meta device."""
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
        masks = self._find_masks(neurons, input.device).to(input.dtype) * (1 / (1 - self.p))
        part = torch.arange(samples, device=input.device) * self.tau // max(samples, 1)
        self.position.add_(1)
        shape = [size if dim in {0, neuron_dim} else 1 for dim, size in enumerate(input.shape)]
        return input * masks[part].view(shape)

    def _find_masks(self, neurons: int, device: torch.device) -> Tensor:
        """Work out which neurons are kept by the masks that are in use, shape ``(tau, neurons)``, bool."""
        group = self.position // self.period
        numbers = (group * self.tau + torch.arange(self.tau, device=device)) % self.sigma
        keys = _hash(self.seed ^ _spread(numbers))
        return _hash(keys[:, None] ^ _spread(torch.arange(neurons, device=device))) >= int(self.p * 2**32)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, buffer in (("seed", self.seed), ("position", self.position)):
            state_dict.setdefault(prefix + name, buffer)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """Name the settings."""
        return f"p={self.p:g}, sigma={self.sigma}, tau={self.tau}, period={self.period}"


def _check_settings(iters_per_epoch: int, max_epoch: int, p: float, sigma: int, tau: int) -> None:
    check_whole_numbers(iters_per_epoch=iters_per_epoch, max_epoch=max_epoch, sigma=sigma, tau=tau)
    check_numbers(p=p)
    for name, number, meaning in (
        ("iters_per_epoch", iters_per_epoch, "forward passes of training in an epoch"),
        ("max_epoch", max_epoch, "epochs of training"),
        ("tau", tau, "masks in use at a time"),
    ):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}. It is the number of {meaning}.")
    if sigma < tau:
        raise ValueError(f"sigma must be at least tau, got sigma={sigma} and tau={tau}. It is the number of all masks.")
    if not 0 <= p < 1:
        raise ValueError(f"p must be at least 0 and below 1, got {p}. It is the probability of dropping a neuron.")


_WORD = 2**32 - 1


def _spread(numbers: Tensor) -> Tensor:
    """Spread small int64 numbers over 32 bits, by the golden ratio."""
    return (numbers * 0x9E3779B1) & _WORD


def _hash(words: Tensor) -> Tensor:
    """Mix 32-bit words, held in int64, by shifts and multiplications; a one-to-one map, as the end of MurmurHash3.

    The factors are below 2^31, so that no product overflows.
    """
    words = ((words ^ (words >> 16)) * 0x21F0AAAD) & _WORD
    words = ((words ^ (words >> 15)) * 0x735A2D97) & _WORD
    return words ^ (words >> 15)

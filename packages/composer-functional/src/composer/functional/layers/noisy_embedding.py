"""Noise on embeddings in training (Jain et al. 2023, arXiv:2310.05914)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from composer.functional.checks import check_interval, check_sizes, check_tensors
from composer.functional.layers.derived import DerivedModule
from composer.functional.random import check_generator


class NoisyEmbedding(DerivedModule):
    """An embedding that adds noise to its next outputs in training (arXiv:2310.05914).

    The class of an instance inherits from this class and from the class of the embedding, so the weight keeps its name.

    Attributes:
        noise: What is added to the next outputs of its shape in training, once; None for nothing.

    Example:
        >>> layer = NoisyEmbedding.take_over(torch.nn.Embedding(10, 4), noise=None)
        >>> layer.noise = torch.ones(2, 3, 4)
        >>> ids = torch.zeros(2, 3, dtype=torch.long)
        >>> torch.equal(layer(ids), layer(ids) + 1)  # the noise is used once
        True
    """

    prefix: ClassVar = "Noisy"
    noise: Tensor | None
    embedding_dim: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the embeddings, with noise if there is any."""
        embeddings, noise = super().forward(*args, **kwargs), self.noise
        if noise is None or not self.training or noise.shape != embeddings.shape:
            return embeddings
        self.noise = None
        return embeddings + noise.to(embeddings.dtype)


def draw_embedding_noise(
    ids: Tensor,
    embedding_dim: int,
    alpha: float = 5.0,
    mask: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw noise for the embeddings of sequences (NEFTune; Jain et al. 2023, arXiv:2310.05914).

    ``noise = alpha / sqrt(length * embedding_dim) * u``, where ``u`` is uniform in ``[-1, 1)`` and ``length`` is the
    number of real tokens of each sequence.

    Args:
        ids: Token ids, shape ``(N, L)``; only shape and device are used.
        embedding_dim: The size ``D`` of an embedding.
        alpha: The size of the noise, at least 0; 5, 10 and 15 in the paper.
        mask: 1 for real tokens and 0 for padding, which gets no noise, shape ``(N, L)``; ``None`` without padding.
        generator: The random generator, on the CPU; torch's default generator if ``None``. It seeds a generator of the
            device, on which the noise is drawn.

    Returns:
        The noise, shape ``(N, L, D)``, float32, on the device of ``ids``.

    Raises:
        TypeError: ``ids`` or ``mask`` is not a tensor, or a number is none.
        ValueError: ``ids`` or ``mask`` has another shape, or a number is out of range.

    Example:
        >>> mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
        >>> noise = draw_embedding_noise(torch.zeros(2, 4), 25, alpha=5.0, mask=mask)
        >>> noise.shape, bool((noise[0].abs() <= 0.5).all()), noise[1, 1:].abs().max()
        (torch.Size([2, 4, 25]), True, tensor(0.))
    """
    check_tensors(ids=ids)
    check_sizes(embedding_dim=embedding_dim)
    check_interval("alpha", alpha, 0, math.inf, "It is the size of the noise.", open_high=True)
    check_generator(generator)
    if ids.ndim != 2 or (mask is not None and getattr(mask, "shape", None) != ids.shape):
        of_mask = "None" if mask is None else tuple(getattr(mask, "shape", ()))
        raise ValueError(f"ids and mask must have shape (N, L), got {tuple(ids.shape)} and {of_mask}.")
    seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
    own = torch.Generator(ids.device).manual_seed(seed)
    noise = torch.empty(*ids.shape, embedding_dim, device=ids.device).uniform_(-1, 1, generator=own)
    if mask is None:
        return noise.mul_(alpha / math.sqrt(max(ids.shape[1], 1) * embedding_dim))
    real = mask.to(noise.dtype)
    lengths = real.sum(1, keepdim=True).clamp(min=1)
    return noise.mul_((real * (alpha / (lengths * embedding_dim).sqrt()))[..., None])

"""Attention with linear biases (Press et al. 2021, arXiv:2108.12409), and replacements of position embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer.functional.checks import check_flags, check_whole


def alibi_slopes(
    num_heads: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """Return the slope of each head, a geometric sequence (arXiv:2108.12409).

    ``slope[i] = 2 ** (-8 * (i + 1) / num_heads)`` if ``num_heads`` is a power of two. Otherwise the slopes are those of
    the next lower power of two, followed by every other slope of the next higher power, starting with the first.

    Args:
        num_heads: The number of attention heads, at least 1.
        dtype: The slopes' dtype, floating point.
        device: The device of the slopes; torch's default device if ``None``.

    Returns:
        The slopes, shape ``(num_heads,)``.

    Raises:
        TypeError: ``num_heads`` is not an integer, or ``dtype`` not floating point.
        ValueError: ``num_heads`` is less than 1.

    Example:
        >>> alibi_slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
        >>> alibi_slopes(3)
        tensor([0.0625, 0.0039, 0.2500])
    """
    check_whole("num_heads", num_heads, 1, "It is the number of attention heads.")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point torch.dtype, got {dtype!r}. Slopes are fractions.")
    power = 1 << (num_heads.bit_length() - 1)
    steps = torch.arange(1, power + 1, dtype=dtype, device=device) * (8 / power)
    between = (torch.arange(num_heads - power, dtype=dtype, device=device) + 0.5) * (8 / power)
    return torch.exp2(-torch.cat([steps, between]))


@dataclass(frozen=True, slots=True)
class _Last:
    """The last bias and the arguments that it was computed for."""

    key: tuple[Any, ...]
    mask: Tensor | None
    bias: Tensor


class AlibiBias(nn.Module):
    """The bias that ALiBi adds to the logits of attention, which decreases with distance (arXiv:2108.12409).

    ``bias[h, i, j] = -slope[h] * |offset + i - j|`` for query ``i`` and key ``j``, plus the mask. There are no
    parameters and no entries in the state dict, and the length is not limited.

    All layers of a model share one instance. Outside ``torch.compile`` it caches the last bias and returns it for equal
    arguments, until :meth:`forget`. Do not change the bias in place.

    Args:
        num_heads: The number of attention heads.
        causal: Whether keys after the query are masked if no mask is passed.

    Raises:
        TypeError: ``num_heads`` is not an integer.
        ValueError: ``num_heads`` is less than 1.

    Example:
        >>> AlibiBias(num_heads=1, causal=False)(query_length=2, key_length=3) * -256  # the slope is 1/256
        tensor([[[[1., 0., 1.],
                  [2., 1., 0.]]]])
    """

    def __init__(self, num_heads: int, causal: bool = True) -> None:
        super().__init__()
        check_whole("num_heads", num_heads, 1, "It is the number of attention heads.")
        self.num_heads = num_heads
        check_flags(causal=causal)
        self.causal = causal
        self._last: _Last | None = None

    def forward(
        self,
        query_length: int,
        key_length: int,
        mask: Tensor | None = None,
        offset: int | Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Tensor:
        """Compute the bias, including the mask.

        Args:
            query_length: The number of queries.
            key_length: The number of keys.
            mask: A tensor that broadcasts to ``(N, num_heads, query_length, key_length)``: booleans, true where a
                query attends to a key, or numbers to be added to the logits.
            offset: The position of the first query among the keys, a number or an int tensor of one element. If
                ``None``, the last query and the last key have the same position.
            dtype: The dtype of the queries.
            device: The device of the queries.

        Returns:
            The bias, ``(N, num_heads, query_length, key_length)``, with ``N`` of the mask, else 1; the lowest
            number of the dtype, or of float32, where a key is masked.
        """
        start = key_length - query_length if offset is None else offset
        if isinstance(start, Tensor) or torch.compiler.is_compiling():
            return self._compute(query_length, key_length, mask, start, dtype, device)
        version = None if mask is None or mask.is_inference() else mask._version  # noqa: SLF001
        # Tensors created in inference mode cannot be used in training.
        key = (query_length, key_length, start, dtype, device, version, torch.is_inference_mode_enabled())
        if self._last is None or self._last.key != key or self._last.mask is not mask:
            bias = self._compute(query_length, key_length, mask, start, dtype, device)
            self._last = _Last(key, mask, bias)
        return self._last.bias

    def forget(self) -> None:
        """Delete the cached bias."""
        self._last = None

    def _compute(
        self,
        query_length: int,
        key_length: int,
        mask: Tensor | None,
        start: int | Tensor,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> Tensor:
        # float16 represents integers, and so distances, exactly only up to 2048, and bfloat16 up to 256.
        exact = torch.promote_types(dtype, torch.float32)
        queries = torch.arange(query_length, dtype=exact, device=device)[:, None] + start
        distances = queries - torch.arange(key_length, dtype=exact, device=device)
        slopes = alibi_slopes(self.num_heads, dtype=exact, device=device)
        bias = (-slopes[:, None, None] * distances.abs()).to(dtype)[None]
        # Not minus infinity, not even in float32, the softmax's dtype: the result for a query whose keys are all
        # masked, such as padding, would be NaN.
        lowest = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
        if mask is None:
            return bias.masked_fill(distances < 0, lowest) if self.causal and query_length > 1 else bias
        if mask.dtype == torch.bool:
            return torch.where(mask, bias, lowest)
        return (bias + mask.to(dtype)).clamp_(min=lowest)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of a model do not need the cached bias, which may be large.
        return self.__dict__ | {"_last": None}

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"num_heads={self.num_heads}, causal={self.causal}"


class NoPositionEmbedding(nn.Module):
    """A replacement of a position embedding that returns zeros."""

    zero: Tensor

    def __init__(self, embedding_dim: int) -> None:
        super().__init__()
        self.register_buffer("zero", torch.zeros(embedding_dim), persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:  # noqa: ARG002 (the signature is that of the embedding)
        """Return zeros of shape ``(embedding_dim,)``, which add to sequences of any length."""
        return self.zero


class NoRotaryEmbedding(nn.Module):
    """A replacement of a rotary embedding that rotates by the angle 0."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines, ones, and sines, zeros, of shape ``(N, length, head_dim)``."""
        cosines = x.new_ones((*position_ids.shape, self.head_dim))
        return cosines, torch.zeros_like(cosines)

"""Dropout of the patches of vision transformers (Liu et al. 2022, arXiv:2208.07220)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from composer.functional.checks import check_interval, check_whole


class PatchDropout(nn.Module):
    """Keep a random part of the patches of each image in training (arXiv:2208.07220).

    Of ``T`` patches ``max(1, floor(T * (1 - p)))`` remain, drawn for each image without replacement from the default
    generator of the input's device; their order changes. The layer belongs behind the addition of position embeddings,
    in front of the first block. The blocks compute with fewer tokens, which saves time and memory. Evaluation is the
    identity. Prefix tokens such as that of the class always remain.

    Shape: ``(N, prefix + T, F)``, any dtype; the output is ``(N, prefix + kept, F)``.

    Args:
        p: The fraction of the patches that is dropped, in ``[0, 1)``.
        num_prefix_tokens: The number of tokens at the start that are not patches.

    Raises:
        TypeError: An argument is not a number.
        ValueError: A number is out of range, or in ``forward`` the input has another shape or no patch.

    Example:
        >>> layer = PatchDropout(p=0.75)
        >>> tokens = torch.rand(2, 1 + 16, 8)
        >>> layer(tokens).shape, layer.eval()(tokens).shape
        (torch.Size([2, 5, 8]), torch.Size([2, 17, 8]))
    """

    def __init__(self, p: float = 0.5, num_prefix_tokens: int = 1) -> None:
        super().__init__()
        check_interval("p", p, 0, 1, "It is the fraction of the patches that is dropped.", open_high=True)
        check_whole("num_prefix_tokens", num_prefix_tokens, 0, "It is the number of tokens that are not patches.")
        self.p, self.num_prefix_tokens = p, num_prefix_tokens

    def forward(self, input: Tensor) -> Tensor:
        """Drop patches in training."""
        if not self.training or self.p == 0:
            return input
        prefix = self.num_prefix_tokens
        if input.ndim != 3 or input.shape[1] <= prefix:
            raise ValueError(
                f"input must have shape (N, tokens, F) with more than {prefix} tokens, the first of which are not "
                f"patches, got {tuple(input.shape)}."
            )
        samples, patches = input.shape[0], input.shape[1] - prefix
        kept = max(1, int(patches * (1 - self.p) + 1e-6))
        chosen = prefix + torch.rand(samples, patches, device=input.device).topk(kept, dim=1).indices
        remaining = input.gather(1, chosen[:, :, None].expand(-1, -1, input.shape[2]))
        return torch.cat([input[:, :prefix], remaining], dim=1)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"p={self.p:g}, num_prefix_tokens={self.num_prefix_tokens}"

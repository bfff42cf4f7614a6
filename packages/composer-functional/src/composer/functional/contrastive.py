"""The contrastive loss of samples by their labels (arXiv:2004.11362), and of two views (arXiv:2002.05709)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from composer.functional.checks import check_float_tensors, check_interval, check_tensors, check_whole
from composer.functional.modes import without_autocast


def contrastive_loss(
    embeddings: Tensor,
    labels: Tensor,
    temperature: float = 0.1,
    *,
    candidates: Tensor | None = None,
    candidate_labels: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Compare each sample with all others: those with its label should be near it, and all others far away.

    With the cosine similarity ``s`` and the set ``P(i)`` of other samples with the label of ``i``, it is the mean of

    ``-1 / |P(i)| * Σ_{p in P(i)} log(exp(s_ip / temperature) / Σ_{k != i} exp(s_ik / temperature))``

    If ``labels`` number the samples, of which there are two views each, it is the NT-Xent loss of SimCLR
    (arXiv:2002.05709); with classes it is the supervised contrastive loss (arXiv:2004.11362). A sample without another
    one of its label has the loss 0, and counts.

    The mean over all samples is that over parts of them, if each part is compared with all: ``candidates`` are the
    embeddings of all, of which the part's begin at row ``first``.

    Args:
        embeddings: Shape ``(N, D)``, floating point; their lengths do not matter. Computed in float32 at least,
            also under autocast.
        labels: Shape ``(N,)``, integers.
        temperature: Similarities are divided by it; more than 0.
        candidates: What the samples are compared with, shape ``(M, D)``; ``embeddings`` if ``None``.
        candidate_labels: Their labels, shape ``(M,)``; needed with ``candidates``.
        first: The row of the first sample in ``candidates``, so that none is compared with itself.

    Returns:
        A scalar.

    Raises:
        TypeError: ``embeddings`` or ``candidates`` are not floating point, or labels are not a tensor.
        ValueError: Shapes do not match, or ``temperature`` or ``first`` is out of range.

    Example:
        >>> views = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
        >>> contrastive_loss(views, torch.tensor([0, 1, 0, 1]), temperature=1.0)
        tensor(0.5514)
    """
    everyone = embeddings if candidates is None else candidates
    all_labels = labels if candidate_labels is None else candidate_labels
    check_float_tensors(embeddings=embeddings, candidates=everyone)
    check_tensors(labels=labels, candidate_labels=all_labels)
    check_interval("temperature", temperature, 0, math.inf, "It divides similarities.", open_low=True, open_high=True)
    check_whole("first", first, 0, "It is a row of candidates.")
    _check_shapes(embeddings, labels, everyone, all_labels, first)
    dtype = torch.promote_types(embeddings.dtype, torch.float32)
    count, places = len(embeddings), torch.arange(len(everyone), device=embeddings.device)
    with without_autocast(embeddings):
        scores = normalize(embeddings.to(dtype)) @ normalize(everyone.to(dtype)).T / temperature
    is_itself = places == places[first : first + count, None]
    log_shares = scores.masked_fill(is_itself, -math.inf).log_softmax(1)
    is_positive = (labels[:, None] == all_labels) & ~is_itself
    sums = log_shares.masked_fill(~is_positive, 0).sum(1)
    return -(sums / is_positive.sum(1).clamp(min=1)).mean()


def _check_shapes(embeddings: Tensor, labels: Tensor, candidates: Tensor, candidate_labels: Tensor, first: int) -> None:
    """Raise a ValueError unless each embedding has a label, and the samples are among two or more candidates."""
    for name, rows, ids in (("", embeddings, labels), ("candidate_", candidates, candidate_labels)):
        if rows.ndim != 2 or ids.shape != rows.shape[:1]:
            raise ValueError(
                f"{name}labels must have shape (N,) for embeddings (N, D), got {tuple(ids.shape)} for "
                f"{tuple(rows.shape)}. Flatten the embeddings of several views to rows, and repeat the labels."
            )
    if candidates.shape[1] != embeddings.shape[1] or len(candidates) < max(2, first + len(embeddings)):
        raise ValueError(
            f"candidates must be two or more embeddings, with the {len(embeddings)} samples from row {first} on, got "
            f"shape {tuple(candidates.shape)} for embeddings {tuple(embeddings.shape)}. Give all that are compared; "
            "drop_last=True of a loader leaves out a last batch of one sample."
        )

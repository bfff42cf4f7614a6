"""Sequence length warm-up: start training on short sequences (Li et al. 2021, arXiv:2108.06084)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from composer.functional.checks import check_flags, check_whole
from composer.functional.nested import rebuild
from composer.functional.training.selective_backprop import take_part


def set_batch_sequence_length(
    batch: Mapping[str, Any], curr_seq_len: int, truncate: bool = True, preserve_end_of_sequence: bool = False
) -> Any:
    """Shorten the sequences of a batch of tokenizers of Transformers (arXiv:2108.06084).

    The shape ``(N, L)`` is that of ``input_ids`` (or the first two dimensions of ``inputs_embeds``). Every tensor whose
    shape starts with it, or with ``(1, L)``, is a sequence: masks, labels of tokens, token types. Floating-point
    ``labels`` of two dimensions are not: as in Transformers, they are targets of each sample, of which there may
    be ``L``. Sequences of at most ``curr_seq_len`` tokens do not change.

    - ``truncate=True``: each sequence keeps its first ``curr_seq_len`` tokens. Other entries do not change: labels of
      samples, ids, lists. Pad on the right, because left padding would be kept instead of tokens.
    - ``truncate=False``: each sequence is split into ``L // curr_seq_len`` samples, in order; the remainder is dropped.
      Other entries with one item per sample are repeated as by :func:`take_samples`, and the rest does not change.
      ``position_ids`` start at 0 in each sample, and in each document of a packed row.

    Rows of :func:`pack_documents` remain packed: their ``document_lengths`` are those of the documents' parts.

    Args:
        batch: A dictionary or another mapping, such as ``BatchEncoding``; not changed.
        curr_seq_len: The new number of tokens, at least 1.
        truncate: Whether to truncate sequences or to split them into more samples.
        preserve_end_of_sequence: Whether the last token of a truncated sequence is moved to the last remaining
            position, with its entries in all sequences except ``position_ids``. The last token is the last one in
            ``attention_mask``.

    Returns:
        A new mapping of the same class, with contiguous tensors of the same dtypes and devices.

    Raises:
        TypeError: ``batch`` is not a dictionary, or ``curr_seq_len`` is not an integer.
        ValueError: ``curr_seq_len`` is less than 1, the batch has no sequences or no samples, its attention mask has
            another shape, it is packed with ``cu_seq_lens_q``, or ``preserve_end_of_sequence`` is set without an
            attention mask or without truncation.

    Example:
        >>> ids = torch.tensor([[1, 5, 6, 7, 2], [1, 8, 2, 0, 0]])
        >>> batch = {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": torch.tensor([0, 1])}
        >>> set_batch_sequence_length(batch, 3)["input_ids"]
        tensor([[1, 5, 6],
                [1, 8, 2]])
        >>> set_batch_sequence_length(batch, 3, preserve_end_of_sequence=True)["input_ids"]
        tensor([[1, 5, 2],
                [1, 8, 2]])
        >>> shorter = set_batch_sequence_length(batch, 2, truncate=False)
        >>> shorter["input_ids"], shorter["labels"]
        (tensor([[1, 5],
                [6, 7],
                [1, 8],
                [2, 0]]), tensor([0, 0, 1, 1]))
    """
    check_whole("curr_seq_len", curr_seq_len, 1, "It is a number of tokens.")
    check_flags(truncate=truncate, preserve_end_of_sequence=preserve_end_of_sequence)
    ids = _get_ids(batch)
    size, length = ids.shape[:2]
    if preserve_end_of_sequence:
        _check_end(batch, truncate)
    shorter = rebuild(batch, batch.values())
    if curr_seq_len >= length:
        return shorter
    positions = _find_positions(batch["attention_mask"], curr_seq_len) if preserve_end_of_sequence else None
    for name, value in batch.items():
        is_sequence = isinstance(value, Tensor) and value.shape[:2] in {(size, length), (1, length)}
        is_sequence = is_sequence and not (name == "labels" and value.ndim == 2 and value.is_floating_point())
        pieces = 1 if truncate else length // curr_seq_len
        if name == "document_lengths":
            starts = range(0, pieces * curr_seq_len, curr_seq_len)
            shorter[name] = [_cut_documents(row, start, start + curr_seq_len) for row in value for start in starts]
        elif not truncate:
            shorter[name] = _split(value, name, size, curr_seq_len) if is_sequence else _repeat(value, ids, pieces)
        elif is_sequence and (positions is None or name == "position_ids"):
            shorter[name] = value[:, :curr_seq_len].contiguous()
        elif is_sequence:
            rows = torch.arange(size, device=value.device)[:, None]
            shorter[name] = value.expand(size, *value.shape[1:])[rows, positions]
    return shorter


def _find_positions(attention_mask: Tensor, curr_seq_len: int) -> Tensor:
    """Return the positions of the tokens to keep: the first ones, with the last token of each sequence at the end."""
    length = attention_mask.shape[1]
    # argmax returns the first maximum, which in the flipped mask is the last token, wherever the padding is.
    last = length - 1 - attention_mask.ne(0).int().flip(1).argmax(1)
    positions = torch.arange(curr_seq_len, device=attention_mask.device).repeat(attention_mask.shape[0], 1)
    positions[:, -1] = last.clamp(min=curr_seq_len - 1)
    return positions


def _split(value: Tensor, name: str, size: int, curr_seq_len: int) -> Tensor:
    """Split sequences into samples of ``curr_seq_len`` tokens."""
    end = value.shape[1] // curr_seq_len * curr_seq_len
    pieces = value.expand(size, *value.shape[1:])[:, :end].reshape(-1, curr_seq_len, *value.shape[2:])
    if name == "position_ids":
        # Only up to the next document of a packed row, whose positions start at 0.
        return torch.where(pieces.eq(0).cumsum(1) > 0, pieces, pieces - pieces[:, :1])
    # Contiguous also if the sequence is cut into one piece, of which reshape returns a view.
    return pieces.contiguous()


def _cut_documents(lengths: list[int], start: int, end: int) -> list[int]:
    """Return the lengths of the parts of a row's documents between two places."""
    ends = [0, *itertools.accumulate(lengths)]
    parts = [min(end, stop) - max(start, begin) for begin, stop in itertools.pairwise(ends)]
    return [part for part in parts if part > 0]


def _repeat(value: Any, ids: Tensor, times: int) -> Any:
    """Repeat entries with one item per sample."""
    size = len(ids)
    rows = torch.arange(size, device=ids.device).repeat_interleave(times)
    return take_part(value, rows, lambda: [row for row in range(size) for _ in range(times)], size)


def _get_ids(batch: Mapping[str, Any]) -> Tensor:
    """Return the tensor ``(N, L)`` or ``(N, L, D)`` that defines the shape of sequences."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"batch must be a dictionary, got {type(batch).__name__}. Name the tensors as the tokenizers of "
            'Transformers do: {"input_ids": ids, "labels": labels}.'
        )
    ids = batch.get("input_ids")  # not with `or`, because a tensor has no truth value
    if ids is None:
        ids = batch.get("inputs_embeds")
    if not isinstance(ids, Tensor) or ids.ndim < 2:
        got = f"a tensor of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(
            f"batch must have a tensor of shape (N, L) as input_ids, or (N, L, D) as inputs_embeds, got {got}. "
            'Let the tokenizer return tensors: return_tensors="pt".'
        )
    size, length = ids.shape[:2]
    if "cu_seq_lens_q" in batch:
        raise ValueError(
            "batch must not have cu_seq_lens_q, the places of the documents in it, which would not fit to shorter "
            "sequences. Let DataSpec(microbatch_transforms=...) add them by cf.add_document_mask."
        )
    if size == 0 or length == 0:
        raise ValueError(f"batch must hold at least one sample with one token, got shape {(size, length)}.")
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape != (size, length):
        raise ValueError(
            f"attention_mask must have shape {(size, length)}, one number for each token, got {tuple(mask.shape)}."
        )
    return ids


def _check_end(batch: Mapping[str, Any], truncate: bool) -> None:
    if not truncate:
        raise ValueError(
            "preserve_end_of_sequence must be False with truncate=False, got True. "
            "Without truncation, all tokens are kept."
        )
    if batch.get("attention_mask") is None:
        raise ValueError(
            "batch must have an attention_mask to preserve the end of its sequences, got none. It defines the end."
        )

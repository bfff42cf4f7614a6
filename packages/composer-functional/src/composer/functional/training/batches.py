"""Batches of tokens whose samples are not rows of one tensor: flattened documents, and images as patches."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from composer.functional.checks import check_sizes, check_whole, described

_OF_IMAGES = [
    ["pixel_values", "image_grid_thw", "image_sizes"],
    ["pixel_values_videos", "video_grid_thw", "second_per_grid_ts"],
]
"""The entries of images and of videos: patches, grids, and others."""


def count_real_tokens(batch: Mapping[str, Any]) -> int:
    """Count the tokens of a batch without padding: ``DataSpec(loader, get_num_tokens_in_batch=cf.count_real_tokens)``.

    Then the tokens of the timestamp, of schedules and of the throughput are real ones. On an accelerator the host waits
    for the number once in a step.

    Args:
        batch: A dictionary with ``input_ids``, ``(..., L)``. What ``attention_mask`` of the same shape marks by 0 is
            not counted; without it, each token is. Of packed rows, ``document_lengths`` are counted.

    Raises:
        TypeError: ``batch`` is no dictionary.
        ValueError: It has no ``input_ids``.

    Example:
        >>> ids = torch.tensor([[5, 6, 7], [8, 0, 0]])
        >>> count_real_tokens({"input_ids": ids, "attention_mask": ids != 0})
        4
    """
    ids = _ids(batch)
    if "document_lengths" in batch:
        return sum(map(sum, batch["document_lengths"]))
    mask = batch.get("attention_mask")
    return int(mask.ne(0).sum()) if isinstance(mask, Tensor) and mask.shape == ids.shape else ids.numel()


def split_image_batch(
    batch: Mapping[str, Any], microbatch_size: int, image_token_id: int, video_token_id: int | None = None
) -> list[dict[str, Any]]:
    """Split a batch of texts with images, whose patches are rows of one tensor, as in Qwen-VL and GLM-V.

    It is the ``split_batch`` of a ``DataSpec``, whose samples are the rows::

        split = partial(cf.split_image_batch, image_token_id=model.config.image_token_id)
        DataSpec(loader, split_batch=split, get_num_samples_in_batch=lambda batch: len(batch["input_ids"]))

    Each part has the patches (``pixel_values``) and the images (``image_grid_thw``, ``(images, 3)``) of its rows, which
    are found by the numbers of their image tokens; of videos ``pixel_values_videos``, ``video_grid_thw`` and
    ``second_per_grid_ts``. Without a grid, ``pixel_values`` has a row for each image, with as many tokens for each. A
    part without images has none of these entries.

    Args:
        batch: A dictionary with ``input_ids``, ``(N, L)``, entries of ``N`` rows, ``position_ids`` of ``(N, L)`` or
            ``(3, N, L)``, and those of images and videos.
        microbatch_size: The number of rows of a part; the last part may be smaller.
        image_token_id: The id that stands for a part of an image, as in the configuration of the model.
        video_token_id: That of videos; needed if there are some.

    Returns:
        The parts, with the entries of the batch.

    Raises:
        TypeError: ``batch`` is no dictionary.
        ValueError: The tokens of a row are not those of complete images, or an entry is neither of rows nor of images.

    Example:
        >>> ids = torch.tensor([[9, 5, 5, 1], [5, 1, 5, 5]])  # one image and two, of 8 + 4 + 8 patches, 4 for a token
        >>> grid = torch.tensor([[1, 2, 4], [1, 2, 2], [1, 4, 2]])
        >>> batch = {"input_ids": ids, "pixel_values": torch.rand(20, 24), "image_grid_thw": grid}
        >>> [(len(part["pixel_values"]), len(part["image_grid_thw"])) for part in split_image_batch(batch, 1, 5)]
        [(8, 1), (12, 2)]
    """
    ids = _ids(batch)
    check_sizes(microbatch_size=microbatch_size)
    slices: dict[str, list[int]] = {}  # for each entry of images, where those of each row start, and the last end
    tokens = {"image_token_id": image_token_id, "video_token_id": video_token_id}
    for (name, token), (pixels, *entries) in zip(tokens.items(), _OF_IMAGES, strict=True):
        if token is not None:
            check_whole(name, token)
        if token is None or batch.get(pixels) is None:
            continue
        grids = batch.get(entries[0])
        patches = torch.ones(len(batch[pixels]), dtype=torch.int64) if grids is None else grids.prod(dim=1).cpu()
        in_row, ends = (ids == token).sum(dim=1).cpu(), torch.cat([patches.new_zeros(1), patches]).cumsum(0)
        # In integers: the patches of a row to all patches are as its tokens to all tokens.
        row_ends, image_ends = in_row.cumsum(0) * ends[-1], ends * in_row.sum()
        images = torch.searchsorted(image_ends, row_ends, right=True) - 1
        is_complete = in_row.any() and torch.equal(image_ends[images], row_ends)
        if not is_complete or ends[-1] != len(batch[pixels]):
            raise ValueError(
                f"The rows must have the tokens of complete images, with {name}={token}, but they have "
                f"{in_row.tolist()} for {len(batch[pixels])} rows of {pixels}, and images of {patches.tolist()} "
                "patches. Do not truncate texts within an image, and pass the id of the model's configuration."
            )
        slices |= {pixels: [0, *ends[images].tolist()], **{entry: [0, *images.tolist()] for entry in entries}}
    firsts = range(0, len(ids), microbatch_size)
    return [_of_rows(batch, slices, first, min(first + microbatch_size, len(ids))) for first in firsts]


def _of_rows(batch: Mapping[str, Any], slices: Mapping[str, list[int]], first: int, last: int) -> dict[str, Any]:
    """Return the part of a batch with some rows."""
    number, part = len(batch["input_ids"]), {}
    for name, value in batch.items():
        is_tensor = isinstance(value, Tensor) and value.ndim > 0
        if name in slices and value is not None:
            start, end = slices[name][first], slices[name][last]
            if start < end:
                part[name] = value[start:end]
        elif is_tensor and value.ndim == 3 and name == "position_ids":
            part[name] = value[:, first:last]
        elif is_tensor and len(value) != number:
            raise ValueError(
                f"The batch has {name!r} of shape {tuple(value.shape)}, which is neither of its {number} rows nor of "
                "images. Remove it, or pass the id of its tokens."
            )
        else:
            part[name] = value[first:last] if isinstance(value, list) or is_tensor else value
    return part


def count_documents(batch: Mapping[str, Any]) -> int:
    """Return the number of documents in a batch of one flattened row.

    It is the ``get_num_samples_in_batch`` of a ``DataSpec`` beside :func:`split_documents`. With ``cu_seq_lens_q``, the
    host does not wait for an accelerator.

    Args:
        batch: See :func:`split_documents`.

    Raises:
        TypeError: ``batch`` is no dictionary.
        ValueError: It has more than one row, or nothing states where documents start.

    Example:
        >>> count_documents({"input_ids": torch.zeros(1, 5), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])})
        2
    """
    return len(_starts(batch))


def split_documents(batch: Mapping[str, Any], microbatch_size: int) -> list[dict[str, Any]]:
    """Split a batch without padding, whose documents are one row, where documents start.

    It is the ``split_batch`` of a ``DataSpec``, for batches as those of Transformers'
    ``DataCollatorWithFlattening``. Documents are its samples::

        DataSpec(loader, split_batch=cf.split_documents, get_num_samples_in_batch=cf.count_documents)

    Args:
        batch: A dictionary with ``input_ids``, ``(1, T)``, further entries of ``T`` tokens, and ``position_ids``, which
            are 0 at the first token of each document, or ``cu_seq_lens_q``, ``(documents + 1,)``. The first label of
            each document should be -100, as no token of it predicts it.
        microbatch_size: The number of documents of a part; the last part may be smaller.

    Returns:
        The parts, with the entries of the batch; in ``cu_seq_lens_q`` and ``cu_seq_lens_k``, ``max_length_q`` and
        ``max_length_k``, and ``seq_idx`` are the places, the largest length and the numbers of their documents.

    Raises:
        TypeError: ``batch`` is no dictionary.
        ValueError: It has more than one row, or nothing states where documents start.

    Example:
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]]), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
        >>> [part["input_ids"].tolist() for part in split_documents(batch, 1)]
        [[[5, 6, 7]], [[8, 9]]]
    """
    check_sizes(microbatch_size=microbatch_size)
    starts, size, parts = _starts(batch).tolist(), batch["input_ids"].shape[1], []
    for first in range(0, len(starts), microbatch_size):
        places = torch.tensor([*starts, size][first : first + microbatch_size + 1])
        start, end = places[[0, -1]].tolist()
        part = {name: _of_tokens(value, size, start, end) for name, value in batch.items()}
        for name in part.keys() & {"cu_seq_lens_q", "cu_seq_lens_k"}:
            part[name] = (places - start).to(batch[name])
        for name in part.keys() & {"max_length_q", "max_length_k"}:
            part[name] = int(places.diff().max())
        if "seq_idx" in part:
            part["seq_idx"] = part["seq_idx"] - part["seq_idx"][0, 0]
        parts.append(part)
    return parts


def _of_tokens(value: Any, size: int, start: int, end: int) -> Any:
    """Return the part of an entry with some tokens, in its first dimension of all; in each of a mask."""
    dims = [dim for dim in range(getattr(value, "ndim", 0)) if value.shape[dim] == size]
    for dim in dims[: None if dims and value.ndim == 4 else 1]:
        value = value.narrow(dim, start, end - start)
    return value


def count_flattened(batch: Any) -> int:
    """Return the number of documents in a row as of ``DataCollatorWithFlattening``; 0 for other batches."""
    ids, places = (batch.get(name) if isinstance(batch, Mapping) else None for name in ("input_ids", "position_ids"))
    if not isinstance(ids, Tensor) or not isinstance(places, Tensor) or ids.shape != places.shape:
        return 0
    is_other = "document_lengths" in batch or batch.get("attention_mask") is not None  # 0 may be padding
    return 0 if is_other or ids.shape[:-1] != (1,) or ids.numel() == 1 else len(_starts(batch))


def warn_of_padding(batch: Any, num_tokens: int) -> None:
    """Warn if a clock that stops the training by tokens counts padding; numbers that a user counts are others."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if isinstance(ids, Tensor) and num_tokens == ids.numel() > (real := count_real_tokens(batch)):
        warnings.warn(
            f"max_duration in tokens counts padding: of {num_tokens} tokens in the first batch {real} are real. Count "
            "these with DataSpec(loader, get_num_tokens_in_batch=cf.count_real_tokens), cf being composer.functional.",
            stacklevel=2,
        )


def _starts(batch: Mapping[str, Any]) -> Tensor:
    """Return where the documents of one row start."""
    ids = _ids(batch)
    name = "position_ids" if batch.get("cu_seq_lens_q") is None else "cu_seq_lens_q"
    if ids.ndim != 2 or len(ids) != 1 or batch.get(name) is None:
        raise ValueError(
            "batch must have one row of documents, with position_ids or cu_seq_lens_q, got input_ids of shape "
            f"{tuple(ids.shape)} and {sorted(map(str, batch))}. Rows are split without this function."
        )
    places: Tensor = batch[name]
    return places[:-1] if name != "position_ids" else places.reshape(-1, ids.shape[1])[0].eq(0).nonzero().flatten()


def _ids(batch: object) -> Tensor:
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch must be a dictionary with input_ids, got {described(batch)}.")
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or not ids.ndim:
        raise ValueError(f"batch must have token ids as input_ids, got {sorted(map(str, batch))}.")
    return ids

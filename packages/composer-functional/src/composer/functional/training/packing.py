"""Sequence packing: several documents in a row, with no attention and no loss across them (arXiv:2404.10830)."""

from __future__ import annotations

import bisect
import contextlib
import inspect
import itertools
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from composer.functional.checks import check_choice, check_modules, check_sizes, check_whole, described
from composer.functional.modes import kept_modes
from composer.functional.transformers_loss import IGNORED, logits_of

MASKS_OF_ANSWERS = ("assistant_masks", "completion_mask")
"""The names under which Transformers and TRL mark the tokens that are trained on."""

_LEAK, _DIFFERENCE = 1e-5, 0.02
"""Differences of logits, relative to the largest, that rounding may cause: between two rows of the same shape, and
between two shapes, also in 16 bits."""


def pack_lengths(lengths: Sequence[int], length: int, method: str = "best_fit") -> list[list[int]]:
    """Assign documents to rows of ``length`` tokens, each document to one row.

    ``"best_fit"`` takes the documents from the longest to the shortest, and puts each into the row with the least space
    that is sufficient (best-fit decreasing, arXiv:2404.10830), in ``O(n log(length))`` steps. ``"in_order"`` starts
    a row whenever the next document does not fit, and preserves their order.

    Args:
        lengths: The number of tokens of each document, from 1 to ``length``.
        length: The number of tokens of a row.
        method: ``"best_fit"`` or ``"in_order"``.

    Returns:
        The rows, each a list of indices of documents. With ``"best_fit"``, the number of rows depends only on the
        multiset of the lengths.

    Raises:
        TypeError: A length is not an integer.
        ValueError: A length is out of range, or ``method`` is unknown.

    Example:
        >>> pack_lengths([5, 3, 4, 2, 2], length=8)
        [[0, 1], [2, 3, 4]]
        >>> pack_lengths([5, 2, 4, 3, 2], length=8, method="in_order")
        [[0, 1], [2, 3], [4]]
    """
    check_sizes(length=length)
    check_choice("method", method, "best_fit", "in_order")
    for index, size in enumerate(lengths):
        check_whole(f"lengths[{index}]", size, 1, "Remove empty documents.")
        if size > length:
            raise ValueError(f"lengths[{index}] must be at most length={length}, got {size}. Split or truncate it.")
    if method == "in_order":
        return _in_order(lengths, length)
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # the numbers of the rows with so many free tokens
    spaces: list[int] = []  # the keys of it, sorted
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect.bisect_left(spaces, lengths[index])
        if place == len(spaces):
            space, number = length, len(rows)
            rows.append([])
        else:
            space = spaces[place]
            number = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[place]
        rows[number].append(index)
        space -= lengths[index]
        if space and space not in with_space:
            bisect.insort(spaces, space)
            with_space[space] = []
        if space:
            with_space[space].append(number)
    return rows


def _in_order(lengths: Sequence[int], length: int) -> list[list[int]]:
    rows: list[list[int]] = []
    space = 0
    for index, size in enumerate(lengths):
        if size > space:
            rows.append([])
            space = length
        rows[-1].append(index)
        space -= size
    return rows


def pack_documents(
    documents: Sequence[Tensor], length: int, *, labels: Sequence[Tensor] | None = None, pad_id: int = 0
) -> dict[str, Any]:
    """Concatenate documents to a row, padded on the right.

    Args:
        documents: The token ids of each, shape ``(n,)``, of one integer dtype; together at most ``length``.
        length: The number of tokens ``L`` of the row.
        labels: The labels of each document, shape ``(n,)``, -100 where there is no loss; its ids if None.
        pad_id: The id of the padding.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, shape ``(L,)``, and ``num_tokens``, the number without
        padding. Labels are those of the same position, as Transformers' causal models shift them; -100 at the start of
        each document, whose token no token of the document predicts, and at padding. Positions start at 0 in each
        document and in the padding.

    Raises:
        TypeError: A document is not a tensor.
        ValueError: There is none, one is empty or has other labels than tokens, or all are longer than ``length``.

    Example:
        >>> row = pack_documents([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], length=6)
        >>> row["labels"], row["position_ids"]
        (tensor([-100,    6,    7, -100,    9, -100]), tensor([0, 1, 2, 0, 1, 0]))
    """
    check_sizes(length=length)
    check_whole("pad_id", pad_id)
    labels = documents if labels is None else labels
    if not documents or len(documents) != len(labels):
        raise ValueError(
            f"documents must be one or more, with labels for each, got {len(documents)} and {len(labels)}."
        )
    for index, (ids, targets) in enumerate(zip(documents, labels, strict=True)):
        if not isinstance(ids, Tensor):
            raise TypeError(f"documents[{index}] must be a tensor of token ids, got {described(ids)}.")
        if ids.ndim != 1 or not len(ids) or targets.shape != ids.shape:
            raise ValueError(
                f"documents[{index}] and its labels must have the same shape (n,), with one token or more, got "
                f"{tuple(ids.shape)} and {tuple(targets.shape)}."
            )
    sizes = [len(ids) for ids in documents]
    padding = length - sum(sizes)
    if padding < 0:
        raise ValueError(f"documents must have at most length={length} tokens together, got {sum(sizes)}.")
    targets = torch.cat([*labels, labels[0].new_full((padding,), IGNORED)])
    targets[[0, *itertools.accumulate(sizes[:-1])]] = IGNORED
    return {
        "input_ids": torch.cat([*documents, documents[0].new_full((padding,), pad_id)]),
        "labels": targets,
        "position_ids": torch.cat([torch.arange(size) for size in (*sizes, padding)]),
        "num_tokens": sum(sizes),
    }


def labels_of(document: Mapping[str, Any], ids: Tensor) -> Tensor:
    """Return the labels of a document, by default its ids; -100 where a mask of answers is 0.

    The masks are those of Transformers and TRL: ``"assistant_masks"`` and ``"completion_mask"``.

    Example:
        >>> labels_of({"assistant_masks": [0, 1, 1]}, torch.tensor([5, 6, 7]))
        tensor([-100,    6,    7])
    """
    labels = ids if document.get("labels") is None else torch.as_tensor(document["labels"])
    for name in MASKS_OF_ANSWERS:
        if (mask := document.get(name)) is not None:
            if len(mask) != len(labels):
                raise ValueError(f"{name} must mark each of the {len(labels)} tokens, got {len(mask)} values.")
            labels = labels.where(torch.as_tensor(mask, device=labels.device).bool(), IGNORED)
    return labels


def measure_documents(documents: Iterable[tuple[Tensor, Tensor]]) -> list[int]:
    """Return the lengths of documents, pairs of ids and labels; warn if no token of them has a label."""
    found = [(len(ids), bool((labels != IGNORED).any())) for ids, labels in documents]
    if found and not any(has_labels for _, has_labels in found):
        templates = "Transformers fills assistant_masks with zeros if the chat template has no {% generation %}."
        warnings.warn(f"The labels of all {len(found)} documents are {IGNORED}: no loss. {templates}", stacklevel=4)
    return [length for length, _ in found]


def collate_packed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a batch of rows of :func:`pack_documents`: the ``collate_fn`` of a loader.

    In a loop of your own, a model of Transformers needs ``model.config.use_cache = False``, and a call of
    :func:`check_packing` with the first batch: with a cache, tokens attend across documents.

    Args:
        rows: The rows.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, shape ``(N, L)``, and ``document_lengths``, for each row the
        list of its documents' lengths, without padding. These lists stay on the host: tokens are counted, and
        ``cu_seqlens`` are made of them, without waiting for a device.

    Raises:
        TypeError: A row is no dictionary.
        ValueError: It was not packed.

    Example:
        >>> ids = torch.arange(5)
        >>> rows = [pack_documents([ids, ids[:3]], 8), pack_documents([ids], 8)]
        >>> batch = collate_packed(rows)
        >>> batch["input_ids"].shape, batch["document_lengths"]
        (torch.Size([2, 8]), [[5, 3], [5]])
    """
    for row in rows:
        if not isinstance(row, Mapping):
            raise TypeError(f"rows must be dictionaries, got {type(row).__name__}. pack_sequences returns such rows.")
        if "num_tokens" not in row or "position_ids" not in row:
            raise ValueError(
                f"rows must have position_ids and num_tokens, got {sorted(row)}. pack_sequences returns such rows; "
                "Transformers' Trainer removes entries from them without remove_unused_columns=False."
            )
    tensors = [{name: value for name, value in row.items() if name != "num_tokens"} for row in rows]
    return {**default_collate(tensors), "document_lengths": [_document_lengths(row) for row in rows]}


def _document_lengths(row: Mapping[str, Any]) -> list[int]:
    size = int(row["num_tokens"])
    starts = row["position_ids"][:size].eq(0).nonzero().flatten().tolist()
    return [end - start for start, end in itertools.pairwise([*starts, size])]


def add_document_mask(batch: Mapping[str, Any], output: str = "mask") -> dict[str, Any]:
    """Add what attention within documents needs, for models that do not derive it from ``position_ids``.

    It is a function for ``DataSpec(loader, microbatch_transforms=...)``, as parts of ``"cu_seqlens"`` cannot be taken:

    - ``"position_ids"``: nothing; models of Transformers find where positions start again.
    - ``"mask"``: ``attention_mask``, boolean, shape ``(N, 1, L, L)``, as ``scaled_dot_product_attention`` takes it:
      True at ``(query, key)`` of the same document with ``key <= query``. The padding of a row is a document. It
      replaces the sliding window of a model of Transformers, for which :func:`check_packing` raises an error.
    - ``"cu_seqlens"``: for kernels of variable lengths, such as FlashAttention's and torch's ``varlen_attn``, under the
      names of Transformers: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, the places where documents start among the
      ``N * L`` tokens, and the end, int32, shape ``(documents + 1,)``; and the longest, ``max_length_q`` and
      ``max_length_k``.

    Args:
        batch: A batch of :func:`collate_packed`; not changed.
        output: ``"position_ids"``, ``"mask"`` or ``"cu_seqlens"``.

    Returns:
        A dictionary with further entries.

    Raises:
        TypeError: ``batch`` is no dictionary.
        ValueError: It was not packed, or ``output`` is unknown.

    Example:
        >>> batch = collate_packed([pack_documents([torch.arange(2), torch.arange(1)], 4)])
        >>> add_document_mask(batch)["attention_mask"].int()
        tensor([[[[1, 0, 0, 0],
                  [1, 1, 0, 0],
                  [0, 0, 1, 0],
                  [0, 0, 0, 1]]]], dtype=torch.int32)
        >>> add_document_mask(batch, "cu_seqlens")["cu_seq_lens_q"]
        tensor([0, 2, 3, 4], dtype=torch.int32)
    """
    check_choice("output", output, "position_ids", "mask", "cu_seqlens")
    positions, lengths = _get_documents(batch)
    if output == "mask":
        documents = positions.eq(0).cumsum(1)
        size = positions.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=positions.device).tril()
        return {**batch, "attention_mask": (documents[:, None, :, None] == documents[:, None, None, :]) & causal}
    if output == "cu_seqlens":
        size = positions.shape[1]
        flat = [number for row in lengths for number in (*row, size - sum(row)) if number]
        ends = torch.tensor([0, *itertools.accumulate(flat)], dtype=torch.int32)
        ends, longest = ends.to(positions.device, non_blocking=True), max(flat)
        names = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        return {**batch, **names}
    return dict(batch)


def _get_documents(batch: Mapping[str, Any]) -> tuple[Tensor, list[list[int]]]:
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch must be a dictionary, got {type(batch).__name__}. collate_packed returns one.")
    if "position_ids" not in batch or "document_lengths" not in batch:
        raise ValueError(
            f"batch must have position_ids and document_lengths, got {sorted(map(str, batch))}. Pack the data by "
            "pack_sequences, and give the loader collate_fn=cf.collate_packed."
        )
    return batch["position_ids"], batch["document_lengths"]


def check_packing(model: nn.Module, batch: Mapping[str, Any], output: str = "position_ids") -> None:
    """Raise an error if a model attends across documents, or ignores that positions start again.

    The Trainer calls it at the first batch from ``pack_sequences``; call it once in a loop of your own. In evaluation
    mode, the logits of the second document of a row are computed three times: packed, packed behind other tokens, which
    must not change them, and alone, where they must be the same up to rounding. A model of Transformers then has no
    mask, so that one that is not causal, such as BERT, fails. The modes and buffers of the model stay as they were. A
    model in which attention has no effect yet, such as one with zero output projections, passes. With a
    cache of keys and values (``config.use_cache=True``), models of Transformers attend across documents.

    Args:
        model: A causal language model that returns logits ``(N, L, V)``, or a dictionary with ``"logits"``. If it takes
            ``input_ids``, it is called with the entries of the batch, except for labels, as keyword arguments,
            otherwise with the batch.
        batch: A batch of :func:`collate_packed` with a row of two documents or more, on the model's device.
        output: What the model is given, see :func:`add_document_mask`.

    Raises:
        TypeError: ``model`` is no module, or ``batch`` no dictionary.
        ValueError: The model fails the check, its forward pass raises an error, no row has two documents, or
            ``output="mask"`` would replace a sliding window that is shorter than the rows.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, use_cache=False, **sizes))
        >>> batch = collate_packed([pack_documents([torch.arange(4), torch.arange(3)], 8)])
        >>> check_packing(model, batch)
    """
    check_modules(model=model)
    check_choice("output", output, "position_ids", "mask", "cu_seqlens")
    _, lengths = _get_documents(batch)
    row = next((number for number, documents in enumerate(lengths) if len(documents) > 1), None)
    if row is None:
        raise ValueError("batch must have two documents in a row to check a model, got one in each: pass more rows.")
    size, window = batch["input_ids"].shape[1], _window_of(model)
    if output == "mask" and size > window:
        # Documents of a few tokens do not show it, and the mask of a document alone would replace the window, too.
        raise ValueError(
            f"output must not be 'mask' for {_name_of(model)}, as its sliding window of {window} tokens is shorter "
            f"than the rows of {size} tokens, and a mask replaces it: take output='position_ids'."
        )
    first, second = lengths[row][:2]
    ids = batch["input_ids"][row, : first + second]
    others = torch.cat([torch.where(ids[:first] == ids.min(), ids.max(), ids.min()), ids[first:]])
    name = _name_of(model)
    # Without a mask, a model of Transformers attends to the tokens that it is made for.
    own = "position_ids" if output == "mask" and _is_of_transformers(model) else output
    cases = ((ids, [first, second], output), (others, [first, second], output), (ids[first:], [second], own))
    try:
        with _evaluated(model):
            packed, behind_others, alone = (
                _logits(model, tokens.split(sizes), form)[-second:].float() for tokens, sizes, form in cases
            )
    except Exception as error:
        raise ValueError(
            f"{name} must return logits for a row of two documents, to show that it keeps them apart, but with "
            f"output={output!r} its forward pass raises {type(error).__name__}: {error}"
        ) from error
    scale = alone.abs().max()
    leak, difference = ((packed - other).abs().max() / scale for other in (behind_others, alone))
    if leak > _LEAK:
        raise ValueError(
            f"{name} must not attend across documents, but with output={output!r} the tokens of a document change the "
            f"logits of the next one by {float(leak):.2g} of the largest. It ignores this form of mask: take another "
            "output of add_document_mask (mask, cu_seqlens), or of a model of Transformers config.use_cache=False and "
            "attn_implementation='sdpa' or a FlashAttention."
        )
    if difference > _DIFFERENCE:
        raise ValueError(
            f"{name} must take position_ids, which start at 0 in each document, and be causal, but with "
            f"output={output!r} the logits of a document differ from those of it alone by {float(difference):.2g} of "
            "the largest."
        )


def _is_of_transformers(model: nn.Module) -> bool:
    return any(hasattr(getattr(module, "config", None), "model_type") for module in model.modules())


def _window_of(model: nn.Module) -> float:
    """Return the smallest number of tokens that a layer attends to, as configurations of Transformers state it."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    windowed = [one for one in configs if set(getattr(one, "layer_types", None) or ["windowed"]) - {"full_attention"}]
    windows = [getattr(one, name, None) for one in windowed for name in ("sliding_window", "attention_chunk_size")]
    return min((window for window in windows if isinstance(window, int)), default=math.inf)


@contextlib.contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation without gradients and compilation, and restore its modes and buffers at the end."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    # A compiled model would be compiled for these shapes, too.
    is_compiled = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext()
    with kept_modes(model), torch.no_grad(), eager:
        model.eval()
        try:
            yield
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)


def _name_of(model: nn.Module) -> str:
    """Return the name of a model's class, with that of the network that it wraps."""
    inner, name = getattr(model, "model", None), type(model).__name__
    takes_batch = "input_ids" not in inspect.signature(model.forward).parameters
    return f"{name} of {type(inner).__name__}" if takes_batch and isinstance(inner, nn.Module) else name


def _logits(model: nn.Module, documents: Sequence[Tensor], output: str) -> Tensor:
    """Return the logits of one row, shape ``(L, V)``."""
    lengths = [*map(len, documents)]
    device = documents[0].device
    part: dict[str, Any] = {
        "input_ids": torch.cat([*documents])[None],
        "position_ids": torch.cat([torch.arange(size, device=device) for size in lengths])[None],
        "document_lengths": [lengths],
    }
    part = add_document_mask(part, output)
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" in parameters:
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        names = part.keys() - {"document_lengths"} if takes_all else part.keys() & parameters.keys()
        outputs = model(**{name: part[name] for name in names})
    else:
        outputs = model(part | {"labels": part["input_ids"]})
    logits: Tensor = outputs if isinstance(outputs, Tensor) else logits_of(outputs)
    return logits[0]

"""The cross entropy of a linear layer's outputs, without all of its logits in memory (arXiv:2411.09009)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer.functional.checks import (
    check_choice,
    check_float_tensors,
    check_interval,
    check_sizes,
    check_tensors,
    check_whole_numbers,
)
from composer.functional.losses import unknown_class


class _Settings(NamedTuple):
    chunk_size: int
    label_smoothing: float
    z_loss: float
    softcap: float | None


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Limit logits smoothly: ``cap * tanh(logits / cap)``, as in Gemma 2 (arXiv:2408.00118).

    Args:
        logits: Logits of any shape, floating point.
        cap: The limit of their absolute values, more than 0.

    Returns:
        A tensor of the same shape and dtype.

    Raises:
        TypeError: ``logits`` is not a floating-point tensor, or ``cap`` not a number.
        ValueError: ``cap`` is not positive and finite.

    Example:
        >>> softcap(torch.tensor([0.0, 30.0, 3000.0]), 30.0)
        tensor([ 0.0000, 22.8478, 30.0000])
    """
    check_float_tensors(logits=logits)
    check_softcap(cap, "cap")
    return (logits / cap).tanh() * cap


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of ``logits = hidden @ weight.T + bias``, of which only a chunk is in memory (arXiv:2411.09009).

    ``loss = logsumexp(logits) - logits[target] + z_loss * logsumexp(logits) ** 2``

    The sum and the mean compute their gradients in the forward pass, from the logits of each chunk, so that they take
    the three matrix products of the usual loss. Losses of each row, and a second backward pass, compute the logits
    again. Matrix products are in autocast's dtype, or in that of ``hidden``; all else is in float32 or float64.
    Derivatives of the gradients are not available.

    Args:
        hidden: Inputs of the linear layer, shape ``(..., D)``.
        weight: Its weight, ``(C, D)``, in the dtype of ``hidden`` unless autocast is enabled.
        targets: Class ids ``(...)``, any integer dtype; or class probabilities ``(..., C)``.
        bias: Its bias, ``(C,)``.
        chunk_size: The number of rows whose logits are in memory at a time; ``None`` for at most 2^24 logits on a
            CPU and 2^27 on a GPU (at least one row).
        ignore_index: The class id that does not count. Of probabilities, a row of zeros does not count.
        label_smoothing: The part of each label to distribute over all classes.
        z_loss: The factor of the squared logarithm of the softmax's denominator, which keeps logits small
            (arXiv:2204.02311).
        softcap: Limits logits to ``softcap * tanh(logits / softcap)`` first; see :func:`softcap`.
        reduction: ``"none"``, ``"mean"`` (over the rows that count; ``nan`` without any) or ``"sum"``.

    Returns:
        The loss: a scalar, or with ``"none"`` one value per row, shape ``(...)``; at least float32.

    Raises:
        TypeError: A tensor has another type, or a number is none.
        ValueError: Shapes do not match, a class id is out of range (on a GPU, CUDA raises a RuntimeError later), or a
            setting is out of range.

    Example:
        >>> hidden, weight, targets = torch.eye(3), 2 * torch.eye(3), torch.tensor([0, 1, -100])
        >>> linear_cross_entropy(hidden, weight, targets, chunk_size=2)
        tensor(0.2395)
        >>> torch.nn.functional.cross_entropy(hidden @ weight.T, targets)
        tensor(0.2395)
    """
    check_choice("reduction", reduction, "none", "mean", "sum")
    check_head_settings(chunk_size, z_loss, softcap)
    check_interval("label_smoothing", label_smoothing, 0, 1, "It is the part of each label to distribute.")
    check_whole_numbers(ignore_index=ignore_index)
    _check_tensors(hidden, weight, targets, bias)
    shape, classes = hidden.shape[:-1], weight.shape[0]
    rows, is_ids = hidden.reshape(-1, hidden.shape[-1]), targets.shape == shape
    if is_ids:
        labels = targets.reshape(-1).long()
        counted = labels != ignore_index
        labels = torch.where(counted, labels, 0)
    else:
        labels = targets.detach().reshape(-1, classes)
        counted = labels.sum(1) > 0
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(device)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    # On a GPU small matrix products are slow: chunks of 128 tokens and 128,000 classes take 4.7 times as long as all
    # logits, those of 1024 tokens 1.4 times (H100, width 4096, bfloat16).
    size = chunk_size or max(1, 2 ** (24 if device == "cpu" else 27) // classes)
    settings = _Settings(size, label_smoothing, z_loss, softcap)
    is_sum = reduction != "none"
    computes_gradients = is_sum and torch.is_grad_enabled()
    if is_sum and torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        wanted = [computes_gradients and one is not None and one.requires_grad for one in (rows, weight, bias)]
        loss: Tensor = _summed(rows, weight, bias, labels, counted, *settings, wanted)[0]
    else:
        with torch.autocast(device, enabled=False):
            loss = _Chunked.apply(rows, weight, bias, labels, counted, settings, is_sum, computes_gradients)
    if reduction == "mean":
        count = counted.sum()
        return torch.where(count > 0, loss / count.clamp(min=1), math.nan)  # its gradient is 0 if no row counts
    return loss if is_sum else loss.reshape(shape)


class _Chunked(torch.autograd.Function):
    """The losses of rows, or their sum."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        counted: Tensor,
        settings: _Settings,
        is_sum: bool,
        computes_gradients: bool,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        ctx.save_for_backward(rows, weight, bias, labels, counted)
        ctx.settings, ctx.is_sum = settings, is_sum
        upstream = counted if computes_gradients and any(wanted) else None
        losses, gradients = _run_chunks(rows, weight, bias, labels, counted, settings, upstream, wanted)
        ctx.gradients = None if upstream is None else gradients
        return losses.sum() if is_sum else losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, labels, counted = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            first = counted if ctx.is_sum else upstream
            wanted = ctx.needs_input_grad[:3]
            _, gradients = _run_chunks(rows, weight, bias, labels, counted, ctx.settings, first, wanted)
        if ctx.is_sum:  # in place, as a second backward pass computes them again
            gradients = [None if one is None else one.mul_(upstream) for one in gradients]
        inputs = zip(gradients, (rows, weight, bias), strict=True)
        return *(None if one is None else one.to(like.dtype) for one, like in inputs), *(None,) * 5


# In a compiled graph the sum is one operation: traced, each number of chunks would be a graph of its own.
_SCHEMA = """(Tensor rows, Tensor weight, Tensor? bias, Tensor labels, Tensor counted, SymInt chunk_size,
float label_smoothing, float z_loss, float? softcap, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)"""


@torch.library.custom_op("composer::chunked_cross_entropy", mutates_args=(), schema=_SCHEMA)
def _summed(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, counted: Tensor, *settings: Any
) -> tuple[Tensor, ...]:
    """Return the sum of the losses, and its gradients by the wanted inputs, for others an empty tensor."""
    *numbers, wanted = settings
    upstream = counted if any(wanted) else None
    with torch.autocast(rows.device.type, enabled=False):
        losses, gradients = _run_chunks(
            rows, weight, bias, labels, counted, _Settings(*numbers), upstream, tuple(wanted)
        )
        return losses.sum(), *(rows.new_empty(0) if one is None else one for one in gradients)


@_summed.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> tuple[Tensor, ...]:
    dtype = torch.promote_types(rows.dtype, torch.float32)
    inputs = zip((rows, weight, bias), settings[-1], (rows.dtype, dtype, dtype), strict=True)
    return rows.new_empty((), dtype=dtype), *(
        torch.empty_like(one, dtype=kind) if one is not None and is_wanted else rows.new_empty(0)
        for one, is_wanted, kind in inputs
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted, ctx.dtypes = inputs[-1], [None if one is None else one.dtype for one in inputs[:3]]
    ctx.save_for_backward(*output[1:])


def _scale(ctx: Any, upstream: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = zip(ctx.saved_tensors, ctx.wanted, ctx.dtypes, strict=True)
    return *((one * upstream).to(dtype) if is_wanted else None for one, is_wanted, dtype in gradients), *(None,) * 7


_summed.register_autograd(_scale, setup_context=_save)


def _run_chunks(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    counted: Tensor,
    settings: _Settings,
    upstream: Tensor | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the losses and, with the ``upstream`` gradients of the losses, the gradients of the wanted inputs."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    losses = rows.new_empty(rows.shape[0], dtype=dtype)
    inputs = (rows, weight, bias) if upstream is not None else ()
    # The gradients of 16-bit weights are summed in float32.
    of_rows, of_weight, of_bias = sums = [
        torch.zeros_like(one, dtype=one.dtype if one is rows else dtype) if one is not None and is_wanted else None
        for one, is_wanted in zip(inputs or (None,) * 3, wanted, strict=True)
    ]
    # A compiled graph then depends on the number of chunks, and not of rows, which is that of tokens in a batch.
    for chunk in range(-(-rows.shape[0] // settings.chunk_size)):
        part = slice(chunk * settings.chunk_size, (chunk + 1) * settings.chunk_size)
        few = rows[part]
        logits = few @ weight.t() if bias is None else torch.addmm(bias, few, weight.t())
        scale = None if upstream is None else (upstream[part] * counted[part]).to(dtype)
        losses[part], slopes = _losses_of(logits.to(dtype), labels[part], counted[part], settings, scale)
        if slopes is None:
            continue
        if of_bias is not None:
            of_bias += slopes.sum(0)
        slopes = slopes.to(rows.dtype)
        if of_rows is not None:
            torch.mm(slopes, weight, out=of_rows[part])
        if of_weight is not None and of_weight.dtype is rows.dtype:
            of_weight.addmm_(slopes.t(), few)
        elif of_weight is not None:
            of_weight += slopes.t() @ few
    return losses, sums


def _losses_of(
    logits: Tensor, labels: Tensor, counted: Tensor, settings: _Settings, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the losses of rows of logits, which are overwritten, and the derivatives of their scaled sum by them."""
    _, smoothing, z_loss, cap = settings
    of_cap = None
    if cap is not None:
        logits = logits.div_(cap).tanh_()
        of_cap = None if scale is None else 1 - logits.square()
        logits = logits.mul_(cap)
    is_ids = labels.ndim == 1
    mass = counted.to(logits.dtype) if is_ids else labels.sum(1)
    label = _pick(logits, labels) if is_ids else (labels * logits).sum(1)
    if smoothing:
        label = (1 - smoothing) * label + smoothing * mass * logits.mean(1)
    top = logits.amax(1, keepdim=True)
    powers = logits.sub_(top).exp_()
    total = powers.sum(1)
    normalizer = total.log() + top.squeeze(1)
    losses = torch.where(counted, mass * normalizer - label + z_loss * normalizer.square(), 0.0)
    if scale is None:
        return losses, None
    slopes = powers.mul_((scale * (mass + 2 * z_loss * normalizer) / total)[:, None])
    share = ((smoothing - 1) * scale)[:, None]
    if is_ids:
        slopes.scatter_add_(1, labels[:, None], share)
    else:
        slopes.addcmul_(labels.to(slopes.dtype), share)
    if smoothing:
        slopes.sub_((scale * mass * (smoothing / slopes.shape[1]))[:, None])
    return losses, slopes if of_cap is None else slopes.mul_(of_cap)


def _pick(logits: Tensor, labels: Tensor) -> Tensor:
    try:
        return logits.gather(1, labels[:, None]).squeeze(1)
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        raise ValueError(unknown_class("targets", labels, logits.shape[1], "ignore_index")) from error


def check_softcap(softcap: object, name: str = "softcap") -> None:
    """Raise an error for a limit that is not a positive, finite number."""
    meaning = "It is the limit of absolute values."
    check_interval(name, softcap, 0, math.inf, meaning, open_low=True, open_high=True)


def check_head_settings(chunk_size: object, z_loss: object, softcap: object) -> None:
    """Raise an error for settings of a chunked head that are out of range."""
    if chunk_size is not None:
        check_sizes(chunk_size=chunk_size)
    check_interval("z_loss", z_loss, 0, math.inf, "It is a factor of a loss.", open_high=True)
    if softcap is not None:
        check_softcap(softcap)


def _check_tensors(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    check_float_tensors(hidden=hidden, weight=weight, **({} if bias is None else {"bias": bias}))
    check_tensors(targets=targets)
    if hidden.ndim < 1 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden and weight must have shapes (..., D) and (C, D), got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}.")
    ids, probabilities = hidden.shape[:-1], (*hidden.shape[:-1], weight.shape[0])
    wanted = probabilities if targets.is_floating_point() else ids
    if targets.shape != wanted or targets.dtype is torch.bool or targets.is_complex():
        raise ValueError(
            f"targets must be integer class ids of shape {tuple(ids)} or class probabilities of shape {probabilities}, "
            f"got {targets.dtype} of shape {tuple(targets.shape)}."
        )

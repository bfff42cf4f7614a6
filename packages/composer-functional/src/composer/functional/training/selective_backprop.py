"""Selective backprop: train on the samples with the highest losses (Jiang et al. 2019, arXiv:1910.00762)."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from composer.functional.checks import (
    check_callables,
    check_interval,
    check_tensors,
    check_whole,
    check_whole_numbers,
)
from composer.functional.modes import kept_modes
from composer.functional.nested import is_list_of_samples, rebuild, sizes

_INTERPOLATIONS = {3: "linear", 4: "bilinear", 5: "trilinear"}


def should_selective_backprop(
    current_duration: float, batch_idx: int, start: float = 0.5, end: float = 0.9, interrupt: int = 2
) -> bool:
    """Return whether to select samples of a batch: between ``start`` and ``end``, except every ``interrupt``-th batch.

    Args:
        current_duration: The completed fraction of the training, in ``[0, 1]``.
        batch_idx: The index of the batch, from 0.
        start: The fraction of the training at which selection starts, in ``[0, 1]``.
        end: The fraction at which selection ends, exclusive, in ``[0, 1]``.
        interrupt: The interval of complete batches, which prevent forgetting of easy samples; 0 for none.

    Raises:
        ValueError: An argument is out of range, or ``end`` comes before ``start``.

    Example:
        >>> [should_selective_backprop(0.6, batch_idx) for batch_idx in range(4)]
        [True, False, True, False]
        >>> should_selective_backprop(0.4, batch_idx=0)
        False
    """
    for name, value in (("current_duration", current_duration), ("start", start), ("end", end)):
        check_interval(name, value, 0, 1, "It is a fraction of the training.")
    check_whole("batch_idx", batch_idx, 0, "It is a number of batches.")
    check_whole("interrupt", interrupt, 0, "It is a number of batches.")
    if end < start:
        raise ValueError(f"end must not come before start, got {end} and {start}.")
    is_complete = interrupt > 0 and (batch_idx + 1) % interrupt == 0
    return start <= current_duration < end and not is_complete


def select_using_loss(
    input: Tensor | Mapping[str, Any],
    target: Tensor | Mapping[str, Any],
    model: nn.Module | Callable[[Any], Any],
    loss_fun: Callable[..., Tensor],
    keep: float = 0.5,
    scale_factor: float = 1,
) -> tuple[Any, Any]:
    """Select the samples of a batch with the highest losses (arXiv:1910.00762).

    The ``floor(keep * N)`` samples with the highest losses, but at least one, are kept in the batch order; among
    equal losses the first, and those without a label, whose loss is NaN, last. The paper draws samples with
    probabilities that grow with their losses; this takes the highest.

    The losses are those of an extra forward pass without gradients and in evaluation mode, which has no side effects:
    running statistics of BatchNorm do not change, dropout draws no random numbers, and the mode of each module is
    restored.

    Args:
        input: Samples, shape ``(N, ...)``; or a dictionary of tensors with the samples first.
        target: The second argument of ``loss_fun``, with the samples first, a tensor or a dictionary likewise.
        model: Called as ``model(input)``.
        loss_fun: Called as ``loss_fun(output, target, reduction="none")``; returns a loss for each sample, shape
            ``(N,)``, or several, ``(N, ...)``, which are averaged. Most losses of ``torch.nn.functional`` support this.
        keep: The fraction of samples to keep, in ``(0, 1]``.
        scale_factor: The scale of the input in the extra pass, in ``(0, 1]``: ``(N, C, L)``,
            ``(N, C, H, W)`` or ``(N, C, D, H, W)``, floating point, by linear interpolation. The returned samples
            are not scaled.

    Returns:
        ``(input, target)`` of the selected samples, new tensors. Other entries of a dictionary with one item per sample
        are selected by :func:`take_samples`.

    Raises:
        TypeError: ``loss_fun`` returned no tensor, or ``input`` is to be scaled and is not a floating-point tensor.
        ValueError: ``keep`` or ``scale_factor`` lies outside ``(0, 1]``, the batch is empty, ``input`` and ``target``
            differ in ``N``, ``input`` has no size that can be scaled, or ``loss_fun`` returned no loss for each sample.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> inputs, targets = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[1.0], [0.0], [3.5], [9.0]])
        >>> select_using_loss(inputs, targets, model, nn.functional.mse_loss, keep=0.5)[0]
        tensor([[2.],
                [4.]])
    """
    check_interval("keep", keep, 0, 1, "It is the fraction of samples to keep.", open_low=True)
    losses = sample_losses(input, target, model, loss_fun, scale_factor)
    chosen, num_samples = highest_losses(losses, keep), len(losses)
    return take_samples(input, chosen, num_samples), take_samples(target, chosen, num_samples)


def sample_losses(
    input: Tensor | Mapping[str, Any],
    target: Tensor | Mapping[str, Any],
    model: nn.Module | Callable[[Any], Any],
    loss_fun: Callable[..., Tensor],
    scale_factor: float = 1,
) -> Tensor:
    """Return the losses of a batch's samples, shape ``(N,)``; arguments and errors as of :func:`select_using_loss`."""
    check_interval("scale_factor", scale_factor, 0, 1, "It is the scale of the input.", open_low=True)
    check_callables(model=model, loss_fun=loss_fun)
    if isinstance(model, type):  # a class is callable, too, and would fail with an unrelated error
        raise TypeError(f"model must be an object, got the class {model.__name__}. Pass {model.__name__}().")
    num_samples = count_samples("input", input)
    if count_samples("target", target) != num_samples:
        raise ValueError(
            f"target must have the input's {num_samples} samples in its first dimension, "
            f"got {count_samples('target', target)}."
        )
    with torch.no_grad(), kept_modes(model) if isinstance(model, nn.Module) else nullcontext():
        if isinstance(model, nn.Module):
            model.eval()
        losses = loss_fun(model(_shrink(input, scale_factor)), target, reduction="none")
    # Under autocast, torch 2.7 caches weights that were cast without a graph; the training pass must not use them.
    if not torch.compiler.is_compiling():
        torch.clear_autocast_cache()
    return mean_losses(losses, num_samples)


def highest_losses(losses: Tensor, keep: float) -> Tensor:
    """Return the indices of the ``floor(keep * N)`` highest losses, but at least one, in their order, int64.

    NaN is the lowest: the loss of a sample without labels is 0 / 0.
    """
    losses = losses.where(~losses.isnan(), -math.inf)
    # The tolerance compensates for rounding just below an integer.
    num_kept = max(1, int(keep * len(losses) + 1e-6))
    return losses.argsort(descending=True, stable=True)[:num_kept].sort().values


def take_samples(batch: Any, chosen: Tensor, num_samples: int) -> Any:
    """Select samples of a batch, from everything in the batch with one entry per sample.

    These are tensors and arrays with ``num_samples`` rows, and lists and tuples of ``num_samples`` items, such as
    strings or dictionaries of boxes, in nested dictionaries, lists, tuples, and attributes of objects. A list of
    tensors (or lists of strings) that all have ``num_samples`` rows contains fields of the batch, not samples.
    Everything else is unchanged.

    Args:
        batch: The batch, or a part of it; not changed.
        chosen: Indices of the samples, int64, in any order, possibly repeated.
        num_samples: The number of samples in the batch.

    Returns:
        A new batch of the same type.

    Example:
        >>> batch = {"x": torch.arange(3), "name": ["a", "b", "c"], "step": torch.tensor(7)}
        >>> take_samples(batch, torch.tensor([0, 2]), num_samples=3)
        {'x': tensor([0, 2]), 'name': ['a', 'c'], 'step': tensor(7)}
    """
    check_tensors(chosen=chosen)
    check_whole_numbers(num_samples=num_samples)
    if chosen.dtype != torch.int64 or chosen.ndim != 1:
        raise TypeError(f"chosen must be an int64 tensor (K,), got {chosen.dtype} of shape {tuple(chosen.shape)}.")
    indices = chosen.tolist  # waits for the device, and only lists need it
    if isinstance(batch, (list, tuple)) and any(num_samples in sizes(part) for part in batch):
        return rebuild(batch, [take_part(part, chosen, indices, num_samples) for part in batch])
    return take_part(batch, chosen, indices, num_samples)


def take_part(part: Any, chosen: Tensor, indices: Callable[[], list[int]], num_samples: int) -> Any:
    """Return the chosen samples of a part of a batch; ``indices()`` returns the same numbers as ``chosen``."""
    if isinstance(part, Tensor):
        return part[chosen.to(part.device)] if part.ndim and len(part) == num_samples else part
    if isinstance(part, (list, tuple)):
        if is_list_of_samples(part, num_samples):
            return rebuild(part, [part[index] for index in indices()])
        items = [take_part(item, chosen, indices, num_samples) for item in part]
        return part if all(map(operator.is_, items, part)) else rebuild(part, items)
    if isinstance(part, Mapping):
        return rebuild(part, [take_part(value, chosen, indices, num_samples) for value in part.values()])
    if getattr(part, "ndim", 0) and hasattr(part, "__array__"):  # NumPy arrays and similar objects
        return part[indices()] if len(part) == num_samples else part
    if hasattr(part, "__dict__") and not callable(part):
        attributes = {name: take_part(value, chosen, indices, num_samples) for name, value in vars(part).items()}
        part = copy.copy(part)
        vars(part).update(attributes)
    return part


def count_samples(name: str, samples: Tensor | Mapping[str, Any]) -> int:
    """Return the number of samples in a tensor or in a dictionary of tensors."""
    if isinstance(samples, Tensor):
        tensors = [samples]
    elif isinstance(samples, Mapping):
        tensors = [value for value in samples.values() if isinstance(value, Tensor)]
    else:
        raise TypeError(f"{name} must be a tensor or a dictionary of tensors, got {type(samples).__name__}.")
    counts = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors}
    if len(counts) != 1 or counts == {0}:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensors"
        raise ValueError(f"{name} must have the samples, at least one, in the first dimension, got {shapes}.")
    return counts.pop()


def _shrink(input: Tensor | Mapping[str, Any], scale_factor: float) -> Tensor | Mapping[str, Any]:
    if scale_factor == 1:
        return input
    if not isinstance(input, Tensor) or not input.is_floating_point():
        kind = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise TypeError(f"input must be a floating-point tensor to be shrunk, got {kind}. Use scale_factor=1.")
    if input.ndim not in _INTERPOLATIONS:
        raise ValueError(
            f"input must be (N, C, L), (N, C, H, W) or (N, C, D, H, W) to be shrunk, got shape {tuple(input.shape)}. "
            "Use scale_factor=1."
        )
    return interpolate(input, scale_factor=scale_factor, mode=_INTERPOLATIONS[input.ndim], align_corners=False)


def mean_losses(losses: Any, num_samples: int) -> Tensor:
    """Return the loss of each sample, ``(N,)``: the mean of its losses, if it has several."""
    if not isinstance(losses, Tensor):
        raise TypeError(f"loss_fun must return a tensor, got {type(losses).__name__}.")
    if losses.ndim == 0 or losses.shape[0] != num_samples:
        raise ValueError(
            f"loss_fun must return a loss for each of the {num_samples} samples when called with reduction='none', "
            f"got shape {tuple(losses.shape)}."
        )
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses

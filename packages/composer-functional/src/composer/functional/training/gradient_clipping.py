"""Gradient clipping: by norm, by value (Pascanu et al. 2012, arXiv:1211.5063), adaptive (arXiv:2102.06171)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor, nn

from composer.functional.checks import check_choice, check_interval
from composer.functional.dtensors import are_plain, is_dtensor, local_parts

_EPSILON = 1e-3
"""The lower bound of a unit's weight norm, so that weights initialised with zero can change (arXiv:2102.06171)."""


@torch.no_grad()
def apply_gradient_clipping(
    model: nn.Module | Iterable[Tensor] | Tensor,
    clipping_type: str,
    clipping_threshold: float,
    fsdp_enabled: bool = False,
) -> Tensor | None:
    """Limit the gradients of parameters, in place.

    - ``"norm"``: all gradients are scaled by one factor so that their total norm is at most the threshold
      (arXiv:1211.5063);
    - ``"value"``: each element is clamped to ``[-threshold, threshold]``;
    - ``"adaptive"``: ``gradient *= min(1, threshold * max(norm(weights), 0.001) / norm(gradient))`` for each unit
      (arXiv:2102.06171). A unit computes one output: a row of a linear layer's weights, a filter of a convolution, in
      general each entry of the first dimension. A parameter with at most one dimension, such as a bias, is one unit.
      The paper does not clip the last linear layer: pass the parameters of the others.

    Gradients may differ in dtype and device; norms are computed in float32 or better. Parameters without a gradient are
    skipped, if others have one. Sparse gradients, as of ``nn.Embedding(..., sparse=True)``, are coalesced, and stay
    sparse. Sharded parameters (DTensors, as ``fully_shard`` creates them) are clipped by the norms
    of the complete parameters; all processes that share them must call this function.

    Args:
        model: A model, several parameters or one; **their gradients are changed in place**.
        clipping_type: ``"norm"``, ``"value"`` or ``"adaptive"``.
        clipping_threshold: The limit, above 0. Infinity only measures the norm.
        fsdp_enabled: Ignored; accepted for compatibility.

    Returns:
        For ``"norm"``, the norm of all gradients before clipping, a tensor without dimensions; else ``None``.

    Raises:
        TypeError: ``model`` is none of the three, or ``clipping_threshold`` is a tensor.
        ValueError: ``clipping_type`` is unknown, ``clipping_threshold`` is not above 0, or no parameter that requires a
            gradient has one.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> apply_gradient_clipping([weight], "norm", 1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    del fsdp_enabled
    check_choice("clipping_type", clipping_type, "norm", "value", "adaptive")
    meaning = "It is the limit of the gradients."
    check_interval("clipping_threshold", clipping_threshold, 0, math.inf, meaning, open_low=True)
    listed = _list_parameters(model)
    parameters = [parameter for parameter in listed if parameter.grad is not None]
    if not parameters:
        _check_nothing_trains(listed, model)
    gradients = list_gradients(parameters)
    if clipping_type == "norm":
        norm = measure_norm(gradients)
        # A factor of 1 where nothing has to be clipped, because a condition would wait for the device. The 1e-6 is that
        # of torch.nn.utils.clip_grad_norm_.
        scale(gradients, (clipping_threshold / (norm + 1e-6)).clamp(max=1.0))
        return norm
    if clipping_type == "value":
        for group in _group(gradients):
            shards = local_parts([gradients[place] for place in group])
            torch._foreach_clamp_min_(shards, -clipping_threshold)
            torch._foreach_clamp_max_(shards, clipping_threshold)
        return None
    _clip_units(parameters, gradients, clipping_threshold)
    return None


def list_gradients(parameters: list[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters that have one; partial sums of sharded ones are reduced over processes.

    Of a sparse gradient, as of an embedding, these are the values ``(number of indices, ...)``, which share its memory.
    """
    gradients: list[Tensor] = [parameter.grad for parameter in parameters]  # type: ignore[misc]
    if are_plain(gradients) and not any(gradient.is_sparse for gradient in gradients):
        return gradients
    for place, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if gradient.is_sparse:
            parameter.grad = gradient.coalesce()  # an index may have occurred several times
            gradients[place] = parameter.grad.values()
            continue
        # The norms of partial sums do not determine the norm of the complete gradient.
        if is_dtensor(gradient) and any(placement.is_partial() for placement in gradient.placements):
            assert is_dtensor(parameter)
            parameter.grad = gradients[place] = gradient.redistribute(placements=parameter.placements)
    return gradients


def measure_norm(gradients: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of all complete gradients together, on the device of the first."""
    if not gradients:
        return torch.zeros(())
    norms = [_vector_norms([gradients[place] for place in group]) for group in _group(gradients)]
    total: Tensor = torch.linalg.vector_norm(torch.cat([each.to(norms[0].device) for each in norms]))
    return total


def scale(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by one factor, in place."""
    for group in _group(gradients):
        shards = local_parts([gradients[place] for place in group])
        torch._foreach_mul_(shards, factor.to(shards[0].device))


def _clip_units(parameters: list[Tensor], gradients: list[Tensor], threshold: float) -> None:
    for group in _group(gradients):
        # A vector, such as a bias, is one unit; other tensors have one for each entry of the first dimension.
        for has_rows, measure in ((False, _vector_norms), (True, _row_norms)):
            places = [place for place in group if (gradients[place].ndim > 1) is has_rows]
            if places:
                clipped = [gradients[place] for place in places]
                limits = (
                    measure([_clipped_rows(parameters[place]) for place in places]).clamp_min_(_EPSILON).mul_(threshold)
                )
                factors = limits.div_(measure(clipped)).clamp_max_(1.0)  # infinite for a norm of zero, then 1
                _multiply_units(local_parts(clipped), factors)


def _clipped_rows(parameter: Tensor) -> Tensor:
    """Return the parameter, or those of its rows that have a sparse gradient."""
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse:
        return parameter
    if gradient.sparse_dim() != 1:
        raise ValueError(
            f'clipping_type="adaptive" requires gradients that are dense or sparse in rows, got {gradient.sparse_dim()}'
            ' sparse dimensions. Use clipping_type="norm" or "value".'
        )
    return parameter[gradient.indices()[0]]


def _multiply_units(gradients: list[Tensor], factors: Tensor) -> None:
    """Multiply each unit by its own factor; ``factors`` is the concatenation of the factors."""
    counts = [gradient.shape[0] if gradient.ndim > 1 else 1 for gradient in gradients]
    shapes = [
        (count, *[1] * (gradient.ndim - 1))[: gradient.ndim] for gradient, count in zip(gradients, counts, strict=True)
    ]
    # One call for all tensors: each view broadcasts the factors over their units.
    parts = torch.split(factors, counts)
    torch._foreach_mul_(gradients, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)])


def _row_norms(tensors: list[Tensor]) -> Tensor:
    """Return the concatenated norms of all entries of the first dimensions, for tensors of one group."""
    shards = local_parts(tensors)
    dtype = _norm_dtype(shards[0])
    norms = [torch.linalg.vector_norm(shard, dim=tuple(range(1, shard.ndim)), dtype=dtype) for shard in shards]
    return _combine_norms(torch.cat(norms), tensors[0], keeps_first=True)


def _vector_norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor, for tensors of one group."""
    shards = local_parts(tensors)
    return _combine_norms(torch.stack(torch._foreach_norm(shards, 2, _norm_dtype(shards[0]))), tensors[0])


def _combine_norms(norms: Tensor, like: Tensor, *, keeps_first: bool = False) -> Tensor:
    """Combine norms of shards over processes; with ``keeps_first``, one norm per entry of the first dimension."""
    if not is_dtensor(like):
        return norms
    summed = [
        dimension
        for dimension, placement in enumerate(like.placements)
        if not placement.is_replicate() and not (keeps_first and getattr(placement, "dim", None) == 0)
    ]
    if not summed:
        return norms
    # The squares of the norms of disjoint parts add up, the norms do not.
    squares = norms.square()
    for dimension in summed:
        torch.distributed.all_reduce(squares, group=like.device_mesh.get_group(dimension))
    return squares.sqrt_()


def _group(tensors: list[Tensor]) -> list[list[int]]:
    """Return the indices of tensors that one operation can process together."""
    groups: dict[Hashable, list[int]] = {}
    for place, tensor in enumerate(tensors):
        spread = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None
        groups.setdefault((tensor.device, tensor.dtype, spread), []).append(place)
    return list(groups.values())


def _norm_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _check_nothing_trains(parameters: list[Tensor], model: object) -> None:
    """Raise an error for missing gradients; a completely frozen model has none."""
    if not parameters and not isinstance(model, nn.Module):
        raise ValueError("model must have parameters, got an empty iterable. A generator can be iterated only once.")
    if any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            f"model must have gradients to clip, got none for its {len(parameters)} parameters. "
            "Clip after backward() and before zero_grad()."
        )


def _list_parameters(model: nn.Module | Iterable[Tensor] | Tensor) -> list[Tensor]:
    if isinstance(model, nn.Module):
        return list(model.parameters())
    if isinstance(model, Tensor):
        return [model]
    parameters = list(model) if isinstance(model, Iterable) else [model]
    wrong = [type(each).__name__ for each in parameters if not isinstance(each, Tensor)]
    if wrong:
        raise TypeError(
            f"model must be a torch.nn.Module, parameters or one parameter, got {wrong[0]}. "
            "Pass model or model.parameters()."
        )
    return parameters

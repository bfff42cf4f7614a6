"""An optimizer's work divided over processes: shares of similar cost, and one collective for their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from composer.distributed.collectives import all_agree, all_gather
from composer.distributed.environment import get_global_rank, get_world_size
from composer.functional.dtensors import is_dtensor
from composer.functional.training.orthogonalization import product_dtype
from composer.optim.stepping import Group, batches_of


def shares_of(costs: Sequence[float], processes: int) -> list[list[int]]:
    """Return the indices of each process's items: the next most expensive one goes to the process with the least work.

    Args:
        costs: The cost of each item. The result depends on nothing else.
        processes: The number of processes.

    Example:
        >>> shares_of([1.0, 1.0, 3.0, 1.0], 2)
        [[2], [0, 1, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(processes)]
    loads = [0.0] * processes
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        least = loads.index(min(loads))
        shares[least].append(place)
        loads[least] += costs[place]
    return shares


def windows_of(batches: Sequence[list[int]], weights: Sequence[Tensor], most: int) -> Iterator[list[int]]:
    """Yield the numbers of successive batches of weights that have together at most so many elements, or are one."""
    window: list[int] = []
    elements = 0
    for number, places in enumerate(batches):
        size = sum(weights[place].numel() for place in places)
        if window and elements + size > most:
            yield window
            window, elements = [], 0
        window.append(number)
        elements += size
    yield window


def divided(
    items: Sequence[Tensor], costs: Sequence[float], compute: Callable[[Tensor], Tensor], dtype: torch.dtype, most: int
) -> list[Tensor]:
    """Return the results of all items: this process computes its share, and receives the others.

    Args:
        items: Tensors on one device, the same in all processes.
        costs: The cost of each.
        compute: Returns the results of a stack of items of one shape, with this shape.
        dtype: The dtype of the results, in which they are exchanged.
        most: The most elements that are computed at once.
    """
    shares = shares_of(costs, get_world_size())
    sizes = [[items[place].numel() for place in share] for share in shares]
    rank, longest = get_global_rank(), max(map(sum, sizes))
    sent = torch.zeros(longest, dtype=dtype, device=items[0].device)
    own, parts = [items[place] for place in shares[rank]], torch.split(sent[: sum(sizes[rank])], sizes[rank])
    for places in batches_of(own, most, by_shape=True):
        results = compute(torch.stack([own[place] for place in places]))
        torch._foreach_copy_([parts[place].view(results.shape[1:]) for place in places], list(results))
    complete = list(items)
    # As bytes, because not every backend exchanges numbers of every dtype.
    for share, of_share, received in zip(shares, sizes, all_gather(sent.view(torch.uint8)), strict=True):
        for place, part in zip(share, torch.split(received.view(dtype)[: sum(of_share)], of_share), strict=True):
            complete[place] = part.view(items[place].shape)
    return complete


def check_division(groups: Sequence[Group]) -> None:
    """Raise a ValueError in all processes if their matrices differ; all must call it, and wait for the device."""
    described = [
        (
            *(str(name), tuple(weight.shape), str(weight.dtype), str(product_dtype(weight.device))),
            "" if is_dtensor(weight) else str(float(weight.sum())),
        )
        for group in groups
        for name, weight in zip(group.get("param_names", itertools.count()), group["params"], strict=False)
    ]
    if not all_agree(described):
        raise ValueError(
            "divide_work=True requires the same matrices in all processes, got some with other names, shapes, dtypes, "
            "values or CPUs with and without AVX-512. Train them with DDP, FSDP2 or tensor parallelism, which begin "
            "with the weights of one process, or set divide_work=False, with which each process computes all updates."
        )

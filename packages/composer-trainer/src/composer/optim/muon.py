"""Muon: momentum whose matrices are orthogonalized (arXiv:2502.16982), with AdamW for all other parameters."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from composer.core.checks import nearest
from composer.distributed.environment import is_connected
from composer.functional import orthogonalize
from composer.functional.checks import check_choice, check_flags, check_interval, check_modules
from composer.functional.dtensors import is_dtensor, local_parts, own_region
from composer.functional.surgery.structure import find_blocks, find_output_layers, find_patch_layers, is_norm
from composer.functional.training.orthogonalization import Coefficients, check_orthogonalization, product_dtype
from composer.optim.division import check_division, divided, windows_of
from composer.optim.stepping import (
    Group,
    Params,
    SteppingOptimizer,
    adamw_step,
    apply_directions,
    batches_of,
    check_adamw,
    decay,
    is_applied_simply,
    placed_like,
)

_log = logging.getLogger(__name__)

_MOST_ELEMENTS = {"cpu": 2**18}
"""The most elements that are orthogonalized at once, by device: larger batches do not fit into a processor's caches."""
_MOST_ELSEWHERE = 2**24
"""On accelerators larger batches need more memory and are not faster."""
_MOST_EXCHANGED = 2**26
"""The most elements whose updates are exchanged at once between processes that divide the work."""


class Muon(SteppingOptimizer):
    """Momentum whose matrices are orthogonalized, and AdamW for parameters that are no hidden matrices.

    With a momentum that starts at 0, a step of a matrix of shape ``(m, n)`` is

    - ``M_t = momentum * M_(t-1) + (1 - momentum) * gradient_t``,
    - ``O_t = orthogonalize((1 - momentum) * gradient_t + momentum * M_t)`` with ``nesterov``, else of ``M_t``; see
      :func:`composer.functional.orthogonalize`,
    - ``weights <- weights - lr * weight_decay * weights - lr * factor * O_t``,

    where ``factor`` is ``0.2 * sqrt(max(m, n))`` for ``"match_rms_adamw"``: updates are as large as AdamW's, so that
    its learning rate and weight decay can be used (arXiv:2502.16982). ``"original"`` is ``sqrt(max(1, m / n))``, and
    ``"spectral_unclamped"`` is ``sqrt(m / n)``.

    It takes the arguments of ``torch.optim.Muon``, and equals it for matrices with
    ``adjust_lr_fn="original"``. It loads the states of ``torch.optim.Muon``, which loads those of matrices whose groups
    have numbers as ``ns_coefficients``, such as its own, ``(3.4445, -4.775, 2.0315)``. In addition,

    - all matrices of one shape are orthogonalized in one batch;
    - tensors with more dimensions, such as the weights of convolutions, are matrices of shape ``(m, -1)``. In groups
      with ``flatten=False`` they are batches of matrices, such as the experts of a mixture;
    - with ``row_beta``, each row of ``O_t`` is divided by the root of an average of its mean square,
      ``v_t = row_beta * v_(t-1) + (1 - row_beta) * mean(O_t^2)``, and the matrix is scaled to the Frobenius norm
      ``sqrt(min(m, n))`` of an orthogonal one. This is NorMuon (arXiv:2510.05491), whose ``row_beta`` is 0.95: neurons
      move by similar amounts;
    - in groups with ``fused=(rows, rows, ...)``, these rows of a weight are matrices of their own, such as the queries,
      keys and values of one projection. In groups with ``transposed=True``, rows are the columns of the weights, as of
      Transformers' ``Conv1D``;
    - groups with ``use_muon=False`` are optimized by AdamW with the group's ``lr``, ``weight_decay``, ``betas`` and
      ``adamw_eps``; :func:`muon_with_adamw` creates the groups;
    - sharded weights (FSDP2, tensor parallelism) have sharded momentum, of which each step gathers the matrices in 16
      bits, in every process.

    Weight decay is multiplied by ``lr``, as in :class:`torch.optim.AdamW`, and unlike that of :class:`DecoupledAdamW`.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or parameter groups with their own settings.
        lr: The learning rate, at least 0.
        weight_decay: The decay of the weights relative to ``lr``, at least 0.
        momentum: The decay of the average of gradients, in ``[0, 1)``.
        nesterov: Whether to use Nesterov momentum.
        ns_coefficients: ``"quintic"``, ``"polar_express"`` or custom coefficients.
        eps: The least norm of a matrix to divide by, more than 0.
        ns_steps: The number of Newton-Schulz steps, at least 1.
        adjust_lr_fn: The factor of the learning rate by shape; None is ``"original"``, as in torch.
        betas: Decay rates of the two averages of AdamW, in ``[0, 1)``.
        adamw_eps: Added to the denominator of AdamW, at least 0.
        cautious_weight_decay: Whether to decay only the elements that the step moves towards zero or not at all:
            with the direction ``u`` of the step, those with ``u * weights >= 0`` (arXiv:2510.12402).
        cautious_update: Whether to apply only the elements of the direction whose sign is that of the gradient,
            multiplied by ``elements / (applied elements + 1)`` (arXiv:2411.16085).
        row_beta: The decay of the averages of the squares of rows, in ``[0, 1)``; None does not normalize rows.
        rounding: What happens to updates of 16-bit weights of less than half the distance to the next number.
            ``"nearest"`` loses them. ``"stochastic"`` rounds up or down at random, so that the mean is exact (bfloat16
            only). ``"kahan"`` adds them later, and needs 16 bits of memory for each weight (arXiv:2010.06192).
        divide_work: Whether each of several connected processes orthogonalizes only its share of the matrices, and
            receives the others. Weights and state are those of the undivided step, bit for bit where products of
            matrices do not depend on the number of them in a batch. All processes must have equal gradients and take
            the same steps, otherwise they wait for each other until a timeout. It is no part of a saved state. One
            process alone does all the work.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range, or a parameter for Muon is not a matrix of real numbers. In the first
            step with ``divide_work``: the matrices of the processes differ.

    Example:
        >>> layer = torch.nn.Linear(4, 3)
        >>> groups = [{"params": [layer.weight]}, {"params": [layer.bias], "use_muon": False, "weight_decay": 0.0}]
        >>> optimizer = Muon(groups, lr=0.01)
        >>> layer(torch.ones(2, 4)).square().sum().backward()
        >>> optimizer.step()
        >>> [sorted(optimizer.state[parameter]) for parameter in layer.parameters()]
        [['momentum_buffer'], ['exp_avg', 'exp_avg_sq', 'step']]
    """

    _checked = 0  # the number of matrices with which the processes can divide the work

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = "quintic",
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        cautious_weight_decay: bool = False,
        cautious_update: bool = False,
        row_beta: float | None = None,
        rounding: str = "nearest",
        divide_work: bool = False,
    ) -> None:
        check_flags(divide_work=divide_work)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "use_muon": True,
            "flatten": True,
            "transposed": False,
            "fused": None,
            "row_beta": row_beta,
            "cautious_weight_decay": cautious_weight_decay,
            "cautious_update": cautious_update,
            "rounding": rounding,
        }
        super().__init__(params, defaults)
        self.divide_work = divide_work  # no setting of groups, which are saved

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "divide_work": self.divide_work}

    def _check(self, group: Group) -> None:
        check_flags(**{name: group[name] for name in ("nesterov", "use_muon", "flatten", "transposed")})
        check_interval("momentum", group["momentum"], 0, 1, "It is the decay of gradients.", open_high=True)
        if group["row_beta"] is not None:
            check_interval("row_beta", group["row_beta"], 0, 1, "It is the decay of squares.", open_high=True)
        check_orthogonalization(group["ns_coefficients"], group["ns_steps"], group["eps"], "ns_")
        check_choice("adjust_lr_fn", group["adjust_lr_fn"], "match_rms_adamw", "original", "spectral_unclamped", None)
        check_adamw(group["betas"], "adamw_eps", group["adamw_eps"])

    def _check_parameters(self, group: Group) -> None:
        super()._check_parameters(group)
        for parameter in group["params"] if group["use_muon"] else ():
            if parameter.ndim < 2 or not parameter.is_floating_point():
                raise ValueError(
                    f"params of Muon must be matrices of real numbers, got one of shape {tuple(parameter.shape)} and "
                    f"{parameter.dtype}. Use muon_with_adamw(model, lr=...), or a group with use_muon=False for others."
                )
            rows, fused = _matrix_shape(parameter, group)[0], group["fused"]
            counts = fused if isinstance(fused, Sequence) else ()
            if fused is not None and (
                not all(isinstance(one, int) and one > 0 for one in counts) or sum(counts) != rows
            ):
                raise ValueError(f"fused must be numbers of rows whose sum is {rows}, got {fused}.")

    def routing(self) -> str:
        """Return a table of the parameters by their optimizer, with names if it was created from named parameters.

        Example:
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
            >>> print(muon_with_adamw(model, lr=0.01).routing())
            Muon: 1 tensor, 32 elements
              0.weight  8 x 4
            AdamW: 1 tensor, 16 elements
              1.weight  2 x 8
            AdamW, weight_decay=0.0: 2 tensors, 10 elements
              0.bias  8
              1.bias  2
        """
        lines = []
        for group in self.param_groups:
            weights = group["params"]
            title = "Muon" if group["use_muon"] else "AdamW"
            if group["weight_decay"] != self.defaults["weight_decay"]:
                title += f", weight_decay={group['weight_decay']}"
            count = f"{len(weights)} tensor{'s' if len(weights) > 1 else ''}"
            lines.append(f"{title}: {count}, {sum(weight.numel() for weight in weights):,} elements")
            names = group.get("param_names", range(len(weights)))
            shapes = (" x ".join(map(str, weight.shape)) for weight in weights)
            lines += [f"  {name}  {shape}" for name, shape in zip(names, shapes, strict=True)]
        return "\n".join(lines)

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        pairs = [pair for pair in zip(weights, gradients, strict=True) if pair[0].numel()]
        if not pairs:
            return
        weights, gradients = map(list, zip(*pairs, strict=True))
        if not group["use_muon"]:
            fraction = group["lr"] * group["weight_decay"]
            adamw_step(self.state, weights, gradients, group, fraction=fraction, eps=group["adamw_eps"])
            return
        batches = list(batches_of(weights, _most_elements(weights[0]), by_shape=True))
        divides = self._divides()
        for window in windows_of(batches, weights, _MOST_EXCHANGED if divides else 0):
            of_window = [[weights[place] for place in batches[number]] for number in window]
            new = [
                local_parts([placed_like(gradients[place], weights[place]) for place in batches[number]])
                for number in window
            ]
            stacks = [self._stacked(*each, group) for each in zip(of_window, new, strict=True)]
            results = self._divided(stacks, group) if divides else [_orthogonalized(stack, group) for stack in stacks]
            for number, some, own, result in zip(window, of_window, new, results, strict=True):
                self._apply(some, own, self._directions(some, result, group), group, number)

    def _apply(
        self, weights: list[Tensor], new: list[Tensor], directions: list[Tensor], group: Group, number: int
    ) -> None:
        """Decay the weights of a batch, and subtract their directions: this process's parts."""
        rate, fraction = group["lr"], group["lr"] * group["weight_decay"]
        if group["fused"] is None:  # else the directions have the factors of their parts
            rate *= _factor(*_matrix_shape(weights[0], group), group["adjust_lr_fn"])
        if is_applied_simply(group):
            decay(weights, fraction)
            torch._foreach_add_(local_parts(weights), directions, alpha=-rate)
        else:
            apply_directions(self.state, weights, new, directions, group, rate=rate, fraction=fraction, number=number)

    def _stacked(self, weights: list[Tensor], new: list[Tensor], group: Group) -> Tensor:
        """Update the momentum with gradients, and return the complete matrices to orthogonalize, of each weight."""
        momenta = []
        for weight in weights:
            state = self.state[weight]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            momenta.append(state["momentum_buffer"])
        held = local_parts(momenta)
        torch._foreach_lerp_(held, new, 1 - group["momentum"])
        updates = torch._foreach_lerp(new, held, group["momentum"]) if group["nesterov"] else held  # noqa: SLF001
        stacked = torch.empty((len(weights), *weights[0].shape), dtype=torch.bfloat16, device=updates[0].device)
        torch._foreach_copy_(list(stacked), list(map(_complete, updates, weights)))
        # Contiguous, as other processes receive them: norms depend on the order in memory.
        matrices = stacked.mT.contiguous() if group["transposed"] else stacked
        return matrices.reshape(len(weights), -1, *_matrix_shape(weights[0], group))

    def _divides(self) -> bool:
        """Return whether other processes compute a share of the updates; the first call checks that they can."""
        if not self.divide_work or not is_connected():
            return False
        groups = [group for group in self.param_groups if group["use_muon"]]
        if self._checked != (count := sum(len(group["params"]) for group in groups)):
            check_division(groups)
            self._checked = count
        return True

    @staticmethod
    def _divided(stacks: list[Tensor], group: Group) -> list[Tensor]:
        """Return the orthogonalized matrices of batches, of which this process computes its share."""
        items = [one for stack in stacks for one in stack]
        dtype, most = product_dtype(items[0].device), _most_elements(items[0])
        costs = [_cost(one, group["fused"]) for one in items]
        complete = iter(divided(items, costs, lambda stack: _orthogonalized(stack, group), dtype, most))
        return [torch.stack([next(complete) for _ in stack]) for stack in stacks]

    def _directions(self, weights: list[Tensor], result: Tensor, group: Group) -> list[Tensor]:
        """Return the directions of weights, this process's parts, from their orthogonalized matrices."""
        result = self._scaled(result.flatten(0, 1), weights, group).to(weights[0].dtype)
        shape = weights[0].mT.shape if group["transposed"] else weights[0].shape
        result = result.reshape(-1, *shape)
        result = result.mT if group["transposed"] else result
        return [_part(one, weight) for one, weight in zip(result, weights, strict=True)]

    def _scaled(self, matrices: Tensor, weights: list[Tensor], group: Group) -> Tensor:
        """Return orthogonalized matrices of some weights, with the settings of the group for rows and parts."""
        fused, has_averages = group["fused"], group["row_beta"] is not None
        if fused is None and not has_averages:
            return matrices
        # Contiguous, as those of other processes: sums depend on the order in memory.
        parts = list(torch.split(matrices.contiguous(), list(fused or matrices.shape[1:2]), 1))
        if has_averages:
            squares = torch.cat([part.float().square().mean(2) for part in parts], 1).view(len(weights), -1)
            roots = self._row_averages(weights, squares, group["row_beta"]).sqrt().add(group["eps"])
            of_parts = torch.split(roots.view(*matrices.shape[:2], 1), [part.shape[1] for part in parts], 1)
            parts = [_of_norm(part / root, min(part.shape[1:])) for part, root in zip(parts, of_parts, strict=True)]
        if fused is not None:
            parts = [part * _factor(part.shape[1], part.shape[2], group["adjust_lr_fn"]) for part in parts]
        return torch.cat(parts, 1)

    def _row_averages(self, weights: list[Tensor], squares: Tensor, beta: float) -> Tensor:
        """Update the averages of the mean squares of rows, and return those of all weights."""
        for weight, square in zip(weights, squares, strict=True):
            state = self.state[weight]
            if "row_exp_avg_sq" not in state:
                state["row_exp_avg_sq"] = torch.zeros_like(square)
            elif state["row_exp_avg_sq"].dtype is not square.dtype:  # Optimizer.load_state_dict has the weights' dtype
                state["row_exp_avg_sq"] = state["row_exp_avg_sq"].to(square.dtype)
        # In each process complete; those of a resumed run are replicated DTensors.
        averages = local_parts([self.state[weight]["row_exp_avg_sq"] for weight in weights])
        torch._foreach_lerp_(averages, list(squares), 1 - beta)
        return torch.stack(averages)


def muon_with_adamw(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    *,
    adamw: str | Sequence[str] = (),
    adamw_lr: float | None = None,
    ns_coefficients: Coefficients = "quintic",
    ns_steps: int = 5,
    betas: tuple[float, float] = (0.9, 0.95),
    adamw_eps: float = 1e-8,
    cautious_weight_decay: bool = False,
    cautious_update: bool = False,
    row_beta: float | None = None,
    fused: Mapping[str, int | Sequence[int]] | None = None,
    rounding: str = "nearest",
    divide_work: bool = False,
) -> Muon:
    """Return one :class:`Muon` for all parameters of a model: hidden matrices by Muon, all others by AdamW.

    AdamW optimizes

    - parameters with fewer than two dimensions, and tensors that are one row or column: biases, norms, class tokens.
      They have no weight decay;
    - embeddings: the weights of ``nn.Embedding``, a first convolution whose patches do not overlap, and other layers
      than convolutions that come before the repeated blocks in a module whose name contains ``embed``;
    - output layers: those outside the repeated blocks whose outputs have another size than the inputs of all later
      layers, such as heads with class scores or boxes, and projections of two towers into one space;
    - the weights of norms, and parameters of modules that are no layers: tables, and projections outside the blocks;
    - what ``adamw`` names.

    Weights of convolutions are flattened. Other parameters with three or more dimensions, such as those of experts, are
    batches of matrices. The assignment is logged at the level INFO; :meth:`Muon.routing` returns it.

    Args:
        model: The model. Its frozen parameters are included, and are not changed without gradients.
        lr: The learning rate of both, at least 0. Values for AdamW are suitable, because the sizes of updates match.
        weight_decay: The decay of the weights relative to the learning rate, at least 0.
        momentum: The decay of Muon's average of gradients.
        adamw: Names of further parameters or modules for AdamW; ``*`` matches anything.
        adamw_lr: Another learning rate for AdamW.
        ns_coefficients: Coefficients of Muon, such as ``"polar_express"``.
        ns_steps: The number of Newton-Schulz steps.
        betas: Decay rates of AdamW's averages.
        adamw_eps: Added to AdamW's denominator.
        cautious_weight_decay: Whether to decay only what a step moves towards zero; see :class:`Muon`.
        cautious_update: Whether to apply only what agrees with the gradient.
        row_beta: The decay of the averages of the squares of rows, 0.95 in NorMuon; see :class:`Muon`.
        fused: Matrices that are several ones: their names, or those of their modules, with ``*`` for anything, and the
            number of equal parts of the outputs, or the outputs of each part: ``{"*.c_attn": 3}`` for queries, keys and
            values. Of LoRA's factors in such a module, the one with its outputs has the parts. Projections that
            interleave these by head are no such matrices.
        rounding: How 16-bit weights are rounded.
        divide_work: Whether each of several processes orthogonalizes only its share of the matrices.

    Returns:
        One optimizer, for any trainer and any schedule.

    Raises:
        TypeError: ``model`` is not a module, or a setting has the wrong type.
        ValueError: The model has no matrix for Muon, a name in ``adamw`` matches nothing, or a setting is out of range.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> optimizer = muon_with_adamw(model, lr=0.01, ns_coefficients="polar_express")
        >>> [(group["use_muon"], group["param_names"]) for group in optimizer.param_groups]
        [(True, ['0.weight']), (False, ['1.weight']), (False, ['0.bias', '1.bias'])]
    """
    check_modules(model=model)
    patterns = [adamw] if isinstance(adamw, str) else list(adamw)
    rate = lr if adamw_lr is None else adamw_lr
    groups: dict[object, Group] = {
        "matrices": {"params": []},
        "batches": {"params": [], "flatten": False},
        "others": {"params": [], "use_muon": False, "lr": rate},
        "vectors": {"params": [], "use_muon": False, "lr": rate, "weight_decay": 0.0},
    }
    layouts = _layouts(model, fused or {}, has_rows=row_beta is not None)
    for name, parameter, kind in _assigned(model, patterns):
        is_alone = kind == "matrices" and id(parameter) in layouts
        if kind != "matrices" and "fused" in layouts.get(id(parameter), {}):
            found = "a batch of matrices" if kind == "batches" else "a parameter of AdamW"
            raise ValueError(f"fused must name hidden matrices, got {name!r}, which is {found}.")
        group = groups.setdefault(str(layouts[id(parameter)]), layouts[id(parameter)]) if is_alone else groups[kind]
        group.setdefault("params", []).append((name, parameter))
    if not any(group["params"] and group.get("use_muon", True) for group in groups.values()):
        raise ValueError(
            f"model must have a hidden matrix for Muon, got a {type(model).__name__} whose parameters are embeddings, "
            "the head, norms and biases. Use torch.optim.AdamW."
        )
    optimizer = Muon(
        [group for group in groups.values() if group["params"]],
        lr,
        weight_decay,
        momentum,
        ns_coefficients=ns_coefficients,
        ns_steps=ns_steps,
        betas=betas,
        adamw_eps=adamw_eps,
        cautious_weight_decay=cautious_weight_decay,
        cautious_update=cautious_update,
        row_beta=row_beta,
        rounding=rounding,
        divide_work=divide_work,
    )
    _log.info("Parameters by optimizer:\n%s", optimizer.routing())
    return optimizer


def _assigned(model: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Yield the name, parameter and kind of group of each parameter."""
    modules = dict(model.named_modules())
    blocks = {inner for _, block in find_blocks(model) for inner in block.modules()}
    excluded = _named(model, patterns)
    for module in (*find_output_layers(model), *find_patch_layers(model)):
        excluded.update(map(id, module.parameters()))  # with those of its parametrizations
    for module in modules.values():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or is_norm(module):
            excluded.update(map(id, module.parameters(recurse=False)))
    is_before = True
    for name, parameter in model.named_parameters():
        # A parametrized weight is in module.parametrizations.weight.original.
        path = name.replace(".original", "").replace("parametrizations.", "").split(".")
        owner = modules.get(".".join(path[:-1]))
        is_convolution = isinstance(owner, nn.modules.conv._ConvNd)  # noqa: SLF001
        is_before = is_before and owner not in blocks
        is_embedding = is_before and not is_convolution and any("embed" in part for part in path)
        is_weight = "weight" in path[-1] or ("proj" in path[-1] and (owner in blocks or parameter.ndim > 2))
        layout = {"flatten": is_convolution, "transposed": False}
        rows, columns = _matrix_shape(parameter, layout) if parameter.ndim > 1 else (1, 1)
        if min(rows, columns) <= 1 or not parameter.is_floating_point():
            yield name, parameter, "vectors"
        elif id(parameter) in excluded or is_embedding or not is_weight:
            yield name, parameter, "others"
        else:
            yield name, parameter, "matrices" if parameter.ndim == 2 or is_convolution else "batches"


def _named(model: nn.Module, patterns: Sequence[str], argument: str = "adamw") -> set[int]:
    """Return the identities of the parameters that patterns match, by their names or those of their modules."""
    names = [name for name, _ in model.named_modules() if name]
    found: set[int] = set()
    for pattern in patterns:
        matched = {
            id(one)
            for name, one in model.named_parameters()
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        }
        if not matched:
            raise ValueError(f"{argument} must name parameters or modules, got {pattern!r}{nearest(pattern, names)}")
        found |= matched
    return found


def _layouts(model: nn.Module, fused: Mapping[str, int | Sequence[int]], *, has_rows: bool) -> dict[int, Group]:
    """Return the settings of the groups of matrices whose parts or rows matter, by the identities of parameters."""
    outputs = {id(one): (one.shape[0], False) for one in model.parameters() if one.ndim > 1}
    for module in model.modules():
        if type(module).__name__ == "Conv1D" and isinstance(weight := getattr(module, "weight", None), nn.Parameter):
            outputs[id(weight)] = (weight.shape[1], True)  # that of Transformers: inputs x outputs
    layouts: dict[int, Group] = {
        one: {"transposed": True} for one, (_, is_transposed) in outputs.items() if is_transposed and has_rows
    }
    names = {id(one): name for name, one in model.named_parameters()}
    for pattern, parts in fused.items():
        inner = _inner_matrices(model, pattern, outputs)
        for one in (_named(model, [pattern], "fused") & outputs.keys()) - inner:
            rows, is_transposed = outputs[one]
            if isinstance(parts, int) and (parts < 1 or rows % parts):
                raise ValueError(
                    f"fused must be a number that divides {rows} outputs, got {parts} for {pattern!r} and "
                    f"{names[one]!r}."
                )
            sizes = (rows // parts,) * parts if isinstance(parts, int) else tuple(parts)
            layouts[one] = {"fused": sizes, "transposed": is_transposed}
    return layouts


def _inner_matrices(model: nn.Module, pattern: str, outputs: Mapping[int, tuple[int, bool]]) -> set[int]:
    """Return the matrices in layers of a name whose outputs are not those of the layer, such as LoRA's first factor."""
    found: set[int] = set()
    for layer in (module for name, module in model.named_modules() if fnmatchcase(name, pattern)):
        named: Any = layer
        while not hasattr(named, "out_features") and isinstance(getattr(named, "layer", None), nn.Module):
            named = named.layer  # of QKNorm and ValueResidual
        if isinstance(width := getattr(named, "out_features", None), int):
            found |= {id(one) for one in layer.parameters() if id(one) in outputs and outputs[id(one)][0] != width}
    return found


def _matrix_shape(weight: Tensor, group: Group) -> tuple[int, int]:
    """Return the shape of a tensor as a matrix, or of the matrices in a batch of them."""
    if group["transposed"]:
        return weight.shape[-1], weight.shape[-2]
    if group["flatten"]:
        return weight.shape[0], math.prod(weight.shape[1:])
    return weight.shape[-2], weight.shape[-1]


def _orthogonalized(stack: Tensor, group: Group) -> Tensor:
    """Return the matrices of a stack, of shape ``(weights, matrices, m, n)``, with singular values near 1."""
    matrices, settings = stack.flatten(0, 1), (group["ns_coefficients"], group["ns_steps"], group["eps"])
    if group["fused"] is None:
        return orthogonalize(matrices, *settings).view(stack.shape)
    parts = [orthogonalize(part, *settings) for part in torch.split(matrices, list(group["fused"]), 1)]
    return torch.cat(parts, 1).view(stack.shape)


def _cost(matrices: Tensor, fused: Sequence[int] | None) -> float:
    """Return the multiplications of an orthogonalization step, over two."""
    sides = [sorted((rows, matrices.shape[-1])) for rows in fused or [matrices.shape[-2]]]
    return len(matrices) * sum(low * low * (low + 2 * high) for low, high in sides)


def _most_elements(tensor: Tensor) -> int:
    return _MOST_ELEMENTS.get(tensor.device.type, _MOST_ELSEWHERE)


def _of_norm(matrices: Tensor, square: int) -> Tensor:
    """Return matrices scaled to a Frobenius norm, given its square; zeros remain."""
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    return matrices / norms.clamp(min=torch.finfo(matrices.dtype).tiny) * math.sqrt(square)


def _factor(rows: int, columns: int, rule: str | None) -> float:
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(rows / columns if rule == "spectral_unclamped" else max(1, rows / columns))


def _complete(part: Tensor, weight: Tensor) -> Tensor:
    """Return the complete tensor, in 16 bits, from the parts of all processes; not sharded, it is the tensor itself."""
    if not is_dtensor(weight):
        return part
    sharded: Any = torch.empty_like(weight, dtype=torch.bfloat16, requires_grad=False)
    sharded.to_local().copy_(part)
    complete: Tensor = sharded.full_tensor()
    return complete


def _part(complete: Tensor, weight: Tensor) -> Tensor:
    """Return this process's part of a complete tensor."""
    if not is_dtensor(weight):
        return complete
    return complete[own_region(weight).slices]

"""Fused normalisation: replace norms written in Python by torch's kernels."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer

from composer.functional.checks import check_modules
from composer.functional.surgery.replace import SurgeryReport, replace_module_classes

_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12)
_FUSED_NODES = ("LayerNorm", "RmsNorm", "RMSNorm", "BatchNorm", "GroupNorm")


def apply_fused_layernorm(model: nn.Module, optimizers: Optimizer | Sequence[Optimizer] | None = None) -> SurgeryReport:
    """Replace normalisation layers written in Python by torch's own, in place.

    ``torch.nn.LayerNorm`` already is one kernel, forward and backward, and is not replaced. Layers that compute mean
    and variance operation by operation become ``torch.nn.LayerNorm`` or, without the mean, ``torch.nn.RMSNorm``, with
    the same parameters under the same names.

    A layer is replaced only if a test shows that it computes the same. Its only tensors must be a one-dimensional
    ``weight`` and, optionally, a ``bias``. A copy runs on the CPU on random inputs of many sizes and scales, with
    random weights, in training and evaluation, in float32 and bfloat16. Outputs and gradients must agree with those of
    torch's layer within rounding, and so must the dtypes. The global generators do not advance. Not replaced are layers
    whose ``forward`` takes more than one tensor, layers whose instance has its own ``forward``, and layers with an
    unusual ``eps`` that is not one of their attributes. Under autocast the outputs have the dtype of torch's layers.

    A second call changes nothing. ``torch.export`` works.

    Args:
        model: The model; **changed in place**.
        optimizers: Optimizers of the model. All parameters keep their names, so the optimizers do not change.

    Returns:
        A report of the replaced layers; empty if there are none.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> class Norm(nn.Module):
        ...     def __init__(self, features):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.ones(features))
        ...     def forward(self, x):
        ...         return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        >>> print(apply_fused_layernorm(nn.Sequential(nn.Linear(8, 8), Norm(8))))
        1 module replaced
          1: Norm -> RMSNorm
    """
    check_modules(model=model)
    return replace_module_classes(model, {nn.Module: _fuse}, optimizers)


def _fuse(module: nn.Module, _: int) -> nn.Module | None:
    if not _is_candidate(module):
        return None
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = next((twin for twin in _make_twins(module) if _is_proven(module, twin)), None)
    if fused is not None:
        # The parameter objects themselves, which optimizers refer to.
        for name in ("weight", "bias"):
            fused.register_parameter(name, getattr(module, name, None))
    return fused


def _is_candidate(module: nn.Module) -> bool:
    """Return whether a module is Python code with a one-dimensional weight, optionally a bias, and takes one tensor."""
    cls, weight = type(module), vars(module)["_parameters"].get("weight")
    if cls.__module__.partition(".")[0] == "torch" or "forward" in vars(module) or vars(module)["_buffers"]:
        return False
    parameters = {name: value for name, value in vars(module)["_parameters"].items() if value is not None}
    shapes = {parameter.shape for parameter in parameters.values()}
    return (
        isinstance(weight, nn.Parameter)
        and parameters.keys() <= {"weight", "bias"}
        and len(shapes) == 1
        and weight.ndim == 1
        and len(weight) > 2  # with two features, normalised vectors differ only in signs
        and not list(module.children())
        and len(inspect.signature(cls.forward).parameters) == 2
    )


def _make_twins(module: nn.Module) -> Iterator[nn.Module]:
    """Yield torch's layers that a module may be equivalent to."""
    features, bias = module.get_parameter("weight").numel(), getattr(module, "bias", None) is not None
    numbers = [value for value in vars(module).values() if type(value) is float and 0 < value < 1]
    for eps in dict.fromkeys([*numbers, *_USUAL_EPS]):
        yield nn.LayerNorm(features, eps, bias=bias, device="meta")
        if not bias:
            yield nn.RMSNorm(features, eps, device="meta")


def _is_proven(module: nn.Module, twin: nn.Module) -> bool:
    """Return whether copies of both layers with the same random parameters agree."""
    try:
        ours, theirs = (copy.deepcopy(each).to_empty(device="cpu").float() for each in (twin, module))
        generator = torch.Generator("cpu").manual_seed(0)
        with torch.no_grad():
            for name, parameter in ours.named_parameters():
                parameter.normal_(generator=generator)
                theirs.get_parameter(name).copy_(parameter)
        for each in (*ours.parameters(), *theirs.parameters()):
            each.requires_grad_()
        inputs = _draw_inputs(twin.get_parameter("weight").numel(), generator)
        return (
            all(_agree(ours, theirs.train(mode), inputs) for mode in (True, False))
            # Inputs with fewer or more dimensions may raise an error, as in code that is written for three.
            and all(_agree(ours, theirs, each, may_raise=True) for each in (inputs[:, 0], inputs[:, None]))
            # In bfloat16, gradients of separate operations are too coarse to compare.
            and _is_close(ours.bfloat16()(inputs.bfloat16()), theirs.bfloat16().forward(inputs.bfloat16()), 2**-5)
        )
    except Exception:  # noqa: BLE001  (the model's code may raise anything for these inputs)
        return False


def _draw_inputs(features: int, generator: torch.Generator) -> Tensor:
    """Draw vectors with a variance around each usual eps, some with a mean; shape ``(10, 3, features)``."""
    # A wrong eps changes the outputs visibly only where the variance is not much larger than it.
    scales = torch.logspace(-7, 2, 10, device="cpu", dtype=torch.float32)[:, None, None]
    offsets = torch.tensor([0.0, 0.5, -1.0], device="cpu", dtype=torch.float32)[:, None]
    draws = torch.randn(10, 3, features, generator=generator, device="cpu", dtype=torch.float32)
    return (draws + offsets) * scales


def _agree(ours: nn.Module, theirs: nn.Module, input: Tensor, *, may_raise: bool = False) -> bool:
    """Return whether outputs, dtypes and gradients agree within rounding, or ``theirs`` raises an error and may."""
    try:
        theirs_results, is_composed = _run(theirs.forward, [*theirs.parameters()], input)
    except Exception:  # noqa: BLE001  (as above)
        return may_raise
    ours_results, _ = _run(ours.forward, [*ours.parameters()], input)
    return is_composed and all(_is_close(*pair, 1e-4) for pair in zip(ours_results, theirs_results, strict=True))


def _run(forward: Callable[..., Any], parameters: list[nn.Parameter], input: Tensor) -> tuple[tuple[Tensor, ...], bool]:
    """Return output and gradients, and whether several operations of torch computed the output."""
    input = input.detach().requires_grad_()
    output = forward(input)
    gradients = torch.autograd.grad(output.float().square().sum(), [input, *parameters])
    return (output, *gradients), not _is_one_kernel(output)


def _is_one_kernel(output: Tensor) -> bool:
    nodes: list[Any] = [output.grad_fn]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        # A custom autograd function is a kernel of another library.
        if isinstance(node, BackwardCFunction) or any(name in node.name() for name in _FUSED_NODES):
            return True
        nodes += [next_node for next_node, _ in node.next_functions]
    return False


def _is_close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    difference = (ours.float() - theirs.float()).abs().amax(-1)
    return bool((difference <= tolerance * ours.float().abs().amax(-1)).all())

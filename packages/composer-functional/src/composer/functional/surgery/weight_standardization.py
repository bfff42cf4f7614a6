"""Weight standardisation: filters of zero mean and unit variance (Qiao et al. 2019, arXiv:1903.10520)."""

from __future__ import annotations

from math import prod
from typing import cast

from torch import nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from composer.functional.checks import check_modules, check_whole
from composer.functional.layers.weight_standardization import WeightStandardizer
from composer.functional.surgery.replace import Replacement, SurgeryReport

_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def apply_weight_standardization(module: nn.Module, n_last_layers_ignore: int = 0) -> SurgeryReport:
    """Standardise the weights of convolutions at every use, in place (arXiv:1903.10520).

    Each ``torch.nn.Conv1d``, 2d and 3d gets a :class:`WeightStandardizer` by ``torch.nn.utils.parametrize``. Modules
    and parameters stay the same objects, so optimizers remain valid; ``conv.weight`` is computed from the parameter. In
    a state dict ``weight`` becomes ``parametrizations.weight.original``.

    Outputs grow considerably, and the following layer must normalise them. Running statistics of batch normalisation
    fit only after some training: a deep model that is evaluated immediately may overflow.

    As with every parametrization, copies, ``torch.compile`` and ``torch.export`` work, and pickling the module raises
    an error: save its state dict. ``torch.nn.utils.parametrize.remove_parametrizations(conv, "weight")`` keeps the
    standardised weight.

    An existing parametrization is applied first. Not changed are transposed convolutions, lazy ones before their first
    input, convolutions whose filters have a single weight, which would become zero, and those whose weight is not a
    parameter (by the old ``torch.nn.utils.weight_norm``).

    Args:
        module: The model, or a convolution; **changed in place**.
        n_last_layers_ignore: How many convolutions at the end, in the model's order, are not changed; such as the last
            one of a segmentation model, where the scale of the outputs matters.

    Returns:
        A report of the changed convolutions; empty if there are none, as on a second call.

    Raises:
        TypeError: ``module`` is not a module, or ``n_last_layers_ignore`` is not an int.
        ValueError: ``n_last_layers_ignore`` is negative.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))
        >>> print(apply_weight_standardization(model, n_last_layers_ignore=1))
        1 module replaced
          0: Conv2d -> ParametrizedConv2d
        >>> bool(apply_weight_standardization(model, n_last_layers_ignore=1))
        False
    """
    check_modules(module=module)
    meaning = "It is how many convolutions at the end are not changed."
    check_whole("n_last_layers_ignore", n_last_layers_ignore, 0, meaning)
    paths: dict[_Conv, list[str]] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        if isinstance(each, _Conv):
            paths.setdefault(each, []).append(path)
    convs = list(paths)[: max(0, len(paths) - n_last_layers_ignore)]
    return SurgeryReport(tuple(_standardize(conv, paths[conv]) for conv in convs if _is_open(conv)))


def _standardize(conv: _Conv, paths: list[str]) -> Replacement:
    old = type(conv).__name__
    register_parametrization(conv, "weight", WeightStandardizer())
    _parametrizations(conv).train(conv.training)
    return Replacement(tuple(paths), old, type(conv).__name__)


def _is_open(conv: _Conv) -> bool:
    """Return whether the convolution has a weight to standardise that is not standardised yet."""
    if conv.in_channels // conv.groups * prod(conv.kernel_size) <= 1:
        return False
    if is_parametrized(conv, "weight"):
        return not any(isinstance(each, WeightStandardizer) for each in _parametrizations(conv)["weight"].children())
    return "weight" in dict(conv.named_parameters(recurse=False))


def _parametrizations(conv: _Conv) -> nn.ModuleDict:
    return cast("nn.ModuleDict", conv.parametrizations)

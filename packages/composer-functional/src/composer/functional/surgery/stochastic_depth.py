"""Stochastic depth: drop residual blocks at random in training (Huang et al. 2016, arXiv:1603.09382)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from composer.functional.checks import check_choice, check_interval, check_modules, is_module_class
from composer.functional.layers.stochastic_depth import ResidualRule, StochasticDepthBlock
from composer.functional.surgery.replace import SurgeryReport, replace_layers

TargetLayers = str | type[nn.Module] | Mapping[type[nn.Module], ResidualRule | None]


def apply_stochastic_depth(
    model: nn.Module,
    target_layer_name: TargetLayers,
    stochastic_method: str = "block",
    drop_rate: float = 0.2,
    drop_distribution: str = "linear",
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> SurgeryReport:
    """Replace residual blocks by blocks that are dropped at random in training, in place (arXiv:1603.09382).

    Block ``l`` of ``L``, counted from 1, is dropped with probability ``l / L * drop_rate`` (linear) or ``drop_rate``
    (uniform). It becomes a :class:`StochasticDepthBlock` with the same parameters under the same names, so checkpoints
    of the plain model can be loaded, and vice versa. Weights trained with ``"block"`` need the scale that only the
    stochastic block applies in evaluation. Stochastic blocks are not replaced; change their rates by
    :func:`set_drop_rates`.

    In distributed training each rank drops different blocks, whose parameters have no gradient there:
    ``DistributedDataParallel`` needs ``find_unused_parameters=True`` with ``"block"``. ``torch.export`` works in
    evaluation, and with ``"sample"`` in training; a block that runs conditionally cannot be exported.

    Args:
        model: The model; **changed in place**.
        target_layer_name: The blocks: ``"ResNetBottleneck"`` or ``"ResNetBasicBlock"`` of torchvision; or a class whose
            blocks compute ``x + f(x)`` of their first argument, as transformer blocks do; or a mapping of classes to
            a :class:`ResidualRule` for blocks with an activation or a shortcut of another kind, or to ``None``. A
            subclass whose ``forward`` is not the one that the rule describes is not replaced, and neither is a block
            whose instance has its own ``forward``.
        stochastic_method: ``"block"`` drops a block for the entire batch and saves its time; ``"sample"`` drops it
            for each sample independently.
        drop_rate: Probability for the last block, in ``[0, 1]``.
        drop_distribution: ``"linear"`` or ``"uniform"``.
        optimizers: Optimizers of the model. All parameters keep their names, so the optimizers do not change.

    Returns:
        A report of the replaced blocks; empty if there are none.

    Raises:
        TypeError: ``model`` is not a module, or ``target_layer_name`` is none of the three.
        ValueError: A name or number is invalid, or the model itself is such a block.

    Example:
        >>> class Block(nn.Linear):
        ...     def forward(self, x):
        ...         return x + super().forward(x).relu()
        >>> model = nn.Sequential(Block(4, 4), Block(4, 4))
        >>> print(apply_stochastic_depth(model, Block, drop_rate=0.5))
        2 modules replaced
          0: Block -> StochasticBlock
          1: Block -> StochasticBlock
        >>> [block.drop_rate for block in model]
        [0.25, 0.5]
    """
    _check_rates(drop_rate, drop_distribution)
    rules = _find_rules(target_layer_name)
    check_modules(model=model)
    # Checks the method before anything is changed.
    StochasticDepthBlock.around(nn.Identity(), drop_rate, stochastic_method)
    made: list[StochasticDepthBlock] = []

    def find_class(block: nn.Module) -> type[nn.Module]:
        return next((cls for cls in type(block).__mro__ if cls in rules), nn.Module)

    def is_wanted(block: nn.Module) -> bool:
        cls = find_class(block)
        if cls not in rules or "forward" in vars(block):
            return False
        return rules[cls] is None or type(block).forward is cls.forward

    def replace(block: nn.Module, _: int) -> nn.Module:
        made.append(StochasticDepthBlock.around(block, 0.0, stochastic_method, rules[find_class(block)]))
        return made[-1]

    report = replace_layers(
        model, dict.fromkeys(rules, replace), is_wanted, optimizers, skipped=(StochasticDepthBlock,)
    )
    _distribute(made, drop_rate, drop_distribution)
    return report


def set_drop_rates(model: nn.Module, drop_rate: float, drop_distribution: str = "linear") -> None:
    """Set the drop rates of all stochastic blocks of a model, in place.

    For a warm-up of the rates: ``set_drop_rates(model, drop_rate * min(1, batch / warmup_batches))`` before each batch.

    Args:
        model: A model with stochastic blocks; **their drop rates are changed**.
        drop_rate: Probability for the last block, in ``[0, 1]``.
        drop_distribution: ``"linear"``: block ``l`` of ``L`` gets ``l / L * drop_rate``; ``"uniform"``: each the same.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``drop_rate`` or ``drop_distribution`` is invalid, or the model has no stochastic blocks.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity()))
        >>> report = apply_stochastic_depth(model, nn.Identity)
        >>> set_drop_rates(model, 0.1)
        >>> [block.drop_rate for block in model.modules() if isinstance(block, StochasticDepthBlock)]
        [0.05, 0.1]
    """
    _check_rates(drop_rate, drop_distribution)
    check_modules(model=model)
    blocks = [module for module in model.modules() if isinstance(module, StochasticDepthBlock)]
    if not blocks:
        raise ValueError("model must hold stochastic blocks, got one without. Call apply_stochastic_depth first.")
    _distribute(blocks, drop_rate, drop_distribution)


def _distribute(blocks: Sequence[StochasticDepthBlock], drop_rate: float, distribution: str) -> None:
    for number, block in enumerate(blocks, start=1):
        block.drop_rate = drop_rate * number / len(blocks) if distribution == "linear" else drop_rate


def _check_rates(drop_rate: float, distribution: str) -> None:
    check_interval("drop_rate", drop_rate, 0, 1, "It is a probability.")
    check_choice("drop_distribution", distribution, "linear", "uniform")


def _find_rules(target: TargetLayers) -> Mapping[type[nn.Module], ResidualRule | None]:
    if isinstance(target, str):
        if target not in _NAMED_BLOCKS:
            raise ValueError(
                f"target_layer_name must be one of {', '.join(map(repr, _NAMED_BLOCKS))}, got {target!r}. "
                "For other blocks pass their class, or a mapping {class: ResidualRule(...)}."
            )
        class_name, rule = _NAMED_BLOCKS[target]
        # Imported if the model has such blocks.
        torchvision_resnet = sys.modules.get("torchvision.models.resnet")
        return {} if torchvision_resnet is None else {getattr(torchvision_resnet, class_name): rule}
    if is_module_class(target):
        return {target: None}
    if isinstance(target, Mapping) and all(
        is_module_class(cls) and isinstance(rule, ResidualRule | None) for cls, rule in target.items()
    ):
        return target
    raise TypeError(
        "target_layer_name must be a name, a class of modules, or a mapping of such classes to a ResidualRule or None, "
        f"got {target!r}."
    )


def _bottleneck_branch(block: Any, input: Tensor) -> Tensor:
    hidden = block.relu(block.bn1(block.conv1(input)))
    hidden = block.relu(block.bn2(block.conv2(hidden)))
    output: Tensor = block.bn3(block.conv3(hidden))
    return output


def _basic_branch(block: Any, input: Tensor) -> Tensor:
    output: Tensor = block.bn2(block.conv2(block.relu(block.bn1(block.conv1(input)))))
    return output


def _resnet_shortcut(block: Any, input: Tensor) -> Tensor:
    return input if block.downsample is None else block.downsample(input)


def _resnet_activation(block: Any, input: Tensor) -> Tensor:
    output: Tensor = block.relu(input)
    return output


_NAMED_BLOCKS = {
    "ResNetBottleneck": ("Bottleneck", ResidualRule(_bottleneck_branch, _resnet_shortcut, _resnet_activation)),
    "ResNetBasicBlock": ("BasicBlock", ResidualRule(_basic_branch, _resnet_shortcut, _resnet_activation)),
}

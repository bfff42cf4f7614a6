"""Residual blocks that are dropped at random in training (Huang et al. 2016, arXiv:1603.09382)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from composer.functional.checks import check_choice, check_interval
from composer.functional.layers.derived import DerivedModule, plain_class
from composer.functional.modes import kept_modes

_CHECKED: set[type[nn.Module]] = set()


def _unchanged(_: Any, input: Tensor) -> Tensor:
    return input


@dataclass(frozen=True, slots=True)
class ResidualRule:
    """How a class of residual blocks computes ``activation(shortcut(x) + branch(x))``.

    Each part is a function ``(block, tensor) -> tensor`` that uses the layers of the block. The model can be pickled if
    the functions are defined at module level.

    Attributes:
        branch: The part that is dropped. It also takes all further arguments of the block, such as a mask.
        shortcut: The part that is added and never dropped; the identity by default.
        activation: The function that is applied to the sum; the identity by default.

    Example:
        >>> rule = ResidualRule(branch=lambda block, x: block.norm(block.conv(x)), activation=lambda block, x: x.relu())
        >>> block = nn.ModuleDict({"conv": nn.Conv2d(4, 4, 1), "norm": nn.BatchNorm2d(4)})
        >>> rule.branch(block, torch.rand(2, 4, 8, 8)).shape
        torch.Size([2, 4, 8, 8])
    """

    branch: Callable[..., Tensor]
    shortcut: Callable[[Any, Tensor], Tensor] = _unchanged
    activation: Callable[[Any, Tensor], Tensor] = _unchanged


class StochasticDepthBlock(DerivedModule):
    """A residual block whose branch is dropped with probability ``drop_rate`` in training (arXiv:1603.09382).

    ``"block"``: for a fraction ``drop_rate`` of the batches the branch is not computed; in evaluation it is scaled by
    ``1 - drop_rate``, as in the paper. The decision is drawn from torch's default CPU generator, so nothing waits for
    the device; it is a condition in Python, where ``torch.compile`` breaks the graph.

    ``"sample"``: the branch is dropped for each sample independently, and divided by ``1 - drop_rate`` for the others;
    evaluation is that of the plain block, as in EfficientNet and ``torchvision.ops.StochasticDepth``. The draws come
    from the default generator of the input's device, and ``torch.compile`` creates one graph.

    Instances are created by :meth:`around`; their class inherits from this class and from the block's class. So the
    parameters keep their names in a state dict, and ``isinstance`` of the plain class remains true. With a ``rule`` the
    parts of the block are called one by one. Without a rule the block must compute ``x + f(x)`` of its first argument.

    Attributes:
        drop_rate: The probability, in ``[0, 1]``; may be set at any time. With 0 the block computes the plain block.
        stochastic_method: ``"block"`` or ``"sample"``.
        rule: The block's parts, or ``None``.

    Raises:
        TypeError: In ``forward`` without a ``rule``: the block does not return one tensor of the shape of its input.

    Example:
        >>> block = StochasticDepthBlock.around(nn.Linear(4, 4), drop_rate=1.0)
        >>> type(block).__name__, sorted(block.state_dict())
        ('StochasticLinear', ['bias', 'weight'])
        >>> block(torch.ones(2, 4))
        tensor([[1., 1., 1., 1.],
                [1., 1., 1., 1.]])
    """

    prefix: ClassVar = "Stochastic"
    drop_rate: float
    stochastic_method: str
    rule: ResidualRule | None

    @staticmethod
    def around(
        block: nn.Module,
        drop_rate: float = 0.0,
        stochastic_method: str = "block",
        rule: ResidualRule | None = None,
    ) -> StochasticDepthBlock:
        """Return a stochastic block with all attributes of a block, which must not be used afterwards.

        Args:
            block: A residual block.
            drop_rate: The probability, in ``[0, 1]``.
            stochastic_method: ``"block"`` or ``"sample"``.
            rule: The block's parts; ``None`` for a block that computes ``x + f(x)``.

        Raises:
            ValueError: ``drop_rate`` lies outside ``[0, 1]``, or ``stochastic_method`` is unknown.
        """
        check_interval("drop_rate", drop_rate, 0, 1, "It is a probability.")
        check_choice("stochastic_method", stochastic_method, "block", "sample")
        settings = {"drop_rate": drop_rate, "stochastic_method": stochastic_method, "rule": rule}
        return StochasticDepthBlock.take_over(block, **settings)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the block, or drop its branch."""
        rate = self.drop_rate
        if rate == 0 or (self.stochastic_method == "sample" and not self.training):
            return self._apply_block(input, *args, **kwargs)
        is_drawn_per_batch = self.stochastic_method == "block" and self.training
        if rate == 1 or (is_drawn_per_batch and not torch.empty((), device="cpu").bernoulli_(1 - rate).item()):
            if self.rule is None and self.training and not torch.compiler.is_compiling():
                self._check(input, *args, **kwargs)
            return self._without_branch(input)
        if self.stochastic_method == "block":
            if self.training:
                return self._apply_block(input, *args, **kwargs)
            return self._with_scaled_branch(1 - rate, input, *args, **kwargs)
        shape = [input.shape[0]] + [1] * (input.ndim - 1)
        # With bernoulli_(rate), torch.compile would create a graph for each rate of a warm-up.
        mask = (torch.rand(shape, device=input.device) >= rate).to(input.dtype)
        return self._with_scaled_branch(mask / (1 - rate), input, *args, **kwargs)

    def _apply_block(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = super().forward(input, *args, **kwargs)
        if self.rule is None and not (isinstance(output, Tensor) and output.shape == input.shape):
            result = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise TypeError(
                f"{plain_class(self).__name__} must return a tensor of its input's shape {tuple(input.shape)}, got "
                f"{result}. Without a rule a block must compute x + f(x): pass a ResidualRule with branch and shortcut."
            )
        return output

    def _check(self, input: Tensor, *args: Any, **kwargs: Any) -> None:
        """Raise if the block does not compute a tensor like its input; once for a class, before one is dropped."""
        if plain_class(self) in _CHECKED:
            return
        with kept_modes(self), torch.no_grad():
            self.eval()  # without effects on statistics and random states
            self._apply_block(input, *args, **kwargs)
        torch.clear_autocast_cache()  # torch 2.7 would use weights that were cast without a graph
        _CHECKED.add(plain_class(self))

    def _without_branch(self, input: Tensor) -> Tensor:
        rule = self.rule
        shortcut = input if rule is None else rule.shortcut(self, input)
        # A new tensor, like the sum would be, because later layers may change it in place.
        shortcut = shortcut.clone() if shortcut is input else shortcut
        return shortcut if rule is None else rule.activation(self, shortcut)

    def _with_scaled_branch(self, scale: float | Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rule = self.rule
        if rule is None:
            return input + scale * (self._apply_block(input, *args, **kwargs) - input)
        return rule.activation(self, rule.shortcut(self, input) + scale * rule.branch(self, input, *args, **kwargs))

    def extra_repr(self) -> str:
        """Return the settings for ``repr``, after those of the plain block."""
        own = f"drop_rate={self.drop_rate:g}, stochastic_method={self.stochastic_method!r}"
        return ", ".join(filter(None, [super().extra_repr(), own]))

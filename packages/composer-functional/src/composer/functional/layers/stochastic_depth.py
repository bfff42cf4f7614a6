"""Residual blocks that are dropped at random in training (Huang et al. 2016, arXiv:1603.09382)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

import torch
from torch import Tensor, nn

from composer.functional.checks import check_numbers

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ResidualRule", "StochasticDepthBlock"]

_METHODS = ("block", "sample")
_MADE: dict[type[nn.Module], type[StochasticDepthBlock]] = {}


def _unchanged(_: Any, input: Tensor) -> Tensor:
    return input


@dataclass(frozen=True, slots=True)
class ResidualRule:
    """How a class of residual blocks computes ``activation(shortcut(x) + branch(x))``.

    Each part is a function ``(block, tensor) -> tensor`` and uses what the block holds. Functions of a module, not
    lambdas, let a model be pickled as a whole.

    Attributes:
        branch: What is dropped.
        shortcut: What is added to it and never dropped; the input itself unless given.
        activation: What is done with the sum; nothing unless given.

    Example:
        >>> rule = ResidualRule(branch=lambda block, x: block.norm(block.conv(x)), activation=lambda block, x: x.relu())
        >>> block = nn.ModuleDict({"conv": nn.Conv2d(4, 4, 1), "norm": nn.BatchNorm2d(4)})
        >>> rule.branch(block, torch.rand(2, 4, 8, 8)).shape
        torch.Size([2, 4, 8, 8])
    """

    branch: Callable[[Any, Tensor], Tensor]
    shortcut: Callable[[Any, Tensor], Tensor] = _unchanged
    activation: Callable[[Any, Tensor], Tensor] = _unchanged


class StochasticDepthBlock(nn.Module):
    """A residual block whose branch is dropped with probability ``drop_rate`` in training (arXiv:1603.09382).

    ``"block"``: the branch is not computed at all for a share ``drop_rate`` of the batches; in evaluation it is scaled
    by ``1 - drop_rate``, as in the paper. The decision is drawn from torch's default CPU generator, so nothing waits
    for the device; it is a condition in Python, where ``torch.compile`` breaks the graph.

    ``"sample"``: each sample loses its branch by itself; what is left is divided by ``1 - drop_rate`` in training, and
    evaluation is that of the plain block, as in EfficientNet and ``torchvision.ops.StochasticDepth``. The draws come
    from the default generator of the input's device, and ``torch.compile`` makes one graph.

    Made by :meth:`around`, of a class that adds this one to the block's own. So parameters keep their names in a state
    dict, and ``isinstance`` of the plain class stays true. With a ``rule`` the block's parts are called one by one.
    Without, the block must compute ``x + f(x)`` of its first argument, and is called as a whole.

    Attributes:
        drop_rate: The probability, in ``[0, 1]``; may be set at any time. With 0 the block is the plain one.
        stochastic_method: ``"block"`` or ``"sample"``.
        rule: The block's parts, or ``None``.

    Raises:
        TypeError: In ``forward`` without a ``rule``: the block does not return one tensor of its input's shape.

    Example:
        >>> block = StochasticDepthBlock.around(nn.Linear(4, 4), drop_rate=1.0)
        >>> type(block).__name__, sorted(block.state_dict())
        ('StochasticLinear', ['bias', 'weight'])
        >>> block(torch.ones(2, 4))
        tensor([[1., 1., 1., 1.],
                [1., 1., 1., 1.]])
    """

    plain_class: ClassVar[type[nn.Module]]
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
        """Make a stochastic block that takes over all that a block holds; the block itself is used up.

        Args:
            block: A residual block.
            drop_rate: The probability, in ``[0, 1]``.
            stochastic_method: ``"block"`` or ``"sample"``.
            rule: The block's parts; ``None`` for a block that computes ``x + f(x)``.

        Raises:
            ValueError: ``drop_rate`` lies outside ``[0, 1]``, or there is no such method.
        """
        check_numbers(drop_rate=drop_rate)
        if not 0 <= drop_rate <= 1:
            raise ValueError(f"drop_rate must be between 0 and 1, got {drop_rate}. It is a probability.")
        if stochastic_method not in _METHODS:
            raise ValueError(
                f"stochastic_method must be 'block' or 'sample', got {stochastic_method!r}. "
                "It says what is dropped: the branch for the whole batch, or for each sample by itself."
            )
        made = _new(type(block))
        vars(made).update(vars(block), drop_rate=drop_rate, stochastic_method=stochastic_method, rule=rule)
        return made

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the block, or drop its branch."""
        rate = self.drop_rate
        if rate == 0 or (self.stochastic_method == "sample" and not self.training):
            return self._whole(input, *args, **kwargs)
        if rate == 1 or (self.stochastic_method == "block" and self.training and not _happens(1 - rate)):
            return self._without_branch(input)
        if self.stochastic_method == "block":
            if self.training:
                return self._whole(input, *args, **kwargs)
            return self._with_scaled_branch(1 - rate, input, *args, **kwargs)
        shape = [input.shape[0]] + [1] * (input.ndim - 1)
        # With bernoulli_(rate), torch.compile would make a graph for each rate of a warm-up.
        kept = (torch.rand(shape, device=input.device) >= rate).to(input.dtype)
        return self._with_scaled_branch(kept / (1 - rate), input, *args, **kwargs)

    def _whole(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = super().forward(input, *args, **kwargs)
        if self.rule is None:
            _check_residual(self, input, output)
        return output

    def _without_branch(self, input: Tensor) -> Tensor:
        rule = self.rule
        shortcut = input if rule is None else rule.shortcut(self, input)
        # The sum would be a new tensor too, which an activation or what follows may change in place.
        shortcut = shortcut.clone() if shortcut is input else shortcut
        return shortcut if rule is None else rule.activation(self, shortcut)

    def _with_scaled_branch(self, scale: float | Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rule = self.rule
        if rule is None:
            return input + scale * (self._whole(input, *args, **kwargs) - input)
        return rule.activation(self, rule.shortcut(self, input) + scale * rule.branch(self, input))

    def extra_repr(self) -> str:
        """Name the settings after those of the plain block."""
        own = f"drop_rate={self.drop_rate:g}, stochastic_method={self.stochastic_method!r}"
        return ", ".join(filter(None, [super().extra_repr(), own]))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # Pickle finds classes by name, and this one is made when it is needed.
        reduced = super().__reduce_ex__(protocol)
        assert isinstance(reduced, tuple)
        return _new, (self.plain_class,), *reduced[2:]


def _new(cls: type[nn.Module]) -> StochasticDepthBlock:
    """Make an empty instance of the stochastic version of a class."""
    stochastic = _make_stochastic(cls)
    return stochastic.__new__(stochastic)


def _make_stochastic(cls: type[nn.Module]) -> type[StochasticDepthBlock]:
    """Derive from the block's class and ours, as ``fully_shard`` does: so names and ``isinstance`` stay."""
    return _MADE.get(cls) or _MADE.setdefault(
        cls,
        type(f"Stochastic{cls.__name__}", (StochasticDepthBlock, cls), {"plain_class": cls, "__doc__": cls.__doc__}),
    )


def _happens(probability: float) -> bool:
    """Draw a decision on the CPU."""
    return bool(torch.empty((), device="cpu").bernoulli_(probability).item())


def _check_residual(block: StochasticDepthBlock, input: Tensor, output: object) -> None:
    if not (isinstance(output, Tensor) and output.shape == input.shape):
        came = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            f"{block.plain_class.__name__} must return a tensor of its input's shape {tuple(input.shape)}, got {came}. "
            "Without a rule a block is taken to compute x + f(x): give a ResidualRule with its branch and shortcut."
        )

"""SAM: step along the gradient of the worst weights nearby (Foret et al. 2020, arXiv:2010.01412)."""

from __future__ import annotations

import inspect
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from composer.functional.checks import check_numbers, check_whole_numbers
from composer.functional.training.gradient_clipping import list_gradients, local_parts, measure_norm, scale

if TYPE_CHECKING:
    from collections import defaultdict
    from collections.abc import Callable, Iterator

    from torch.utils.hooks import RemovableHandle

__all__ = ["SAMOptimizer"]

_STEPS = "sam_steps"


class SAMOptimizer(Optimizer):
    """Sharpness-aware minimization around any optimizer (arXiv:2010.01412).

    ``weights + rho * gradient / (norm(gradient) + epsilon)`` is where the loss is about the worst within ``rho``. The
    wrapped optimizer steps from the weights along the gradient from there. The norm is that of all gradients together.

    Groups, state and defaults are the wrapped optimizer's own, so schedulers and surgery may be given either. What is
    saved is what it saves, with the number of steps as ``sam_steps`` in each group: either loads what the other saved,
    and one that is wrapped after loading goes on where it was.

    Args:
        base_optimizer: The optimizer that steps; its own ``step`` must do without a closure.
        rho: How far away the worst weights are looked for, at least 0; 0 is the wrapped optimizer alone.
        epsilon: Added to the norm, above 0, so that it can be divided by.
        interval: Every how many steps to look around, at least 1. The others are those of the wrapped optimizer.

    Attributes:
        base_optimizer: The wrapped optimizer.

    Raises:
        TypeError: ``base_optimizer`` is no optimizer or needs a closure itself, or ``interval`` is no int.
        ValueError: ``rho``, ``epsilon`` or ``interval`` is out of range.

    Example:
        >>> model, inputs = nn.Linear(2, 1), torch.ones(4, 2)
        >>> optimizer = SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = model(inputs).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> first, second = optimizer.step(closure), optimizer.step(closure)
        >>> bool(second < first)
        True
    """

    # GradScaler then hands the scale to `step`, which can say what to call instead.
    _step_supports_amp_scaling = True

    def __init__(self, base_optimizer: Optimizer, rho: float = 0.05, epsilon: float = 1e-12, interval: int = 1) -> None:
        _check_base_optimizer(base_optimizer)
        _check_settings(rho, epsilon, interval)
        self.base_optimizer = base_optimizer
        self.rho = rho
        self.epsilon = epsilon
        self.interval = interval
        # Optimizer.__init__ would make groups of its own; this prepares what hooks need, as after unpickling.
        self.__setstate__({})

    @torch.no_grad()
    def step(  # type: ignore[override]  # without a closure there is no second gradient
        self, closure: Callable[[], Any] | None, scaler: torch.amp.GradScaler | None = None
    ) -> Any:
        """Change the weights by the gradient at the worst weights nearby; every ``interval``-th time.

        Args:
            closure: Clears the gradients, computes the loss and its gradients (of several microbatches, if need be)
                and returns the loss. Called once or twice. ``None`` is refused, unless all learning rates are 0.
            scaler: Scales the loss within ``closure``, which may call ``scaler.unscale_`` on this optimizer, so that
                it can clip; otherwise that is done here. If gradients are not finite nothing steps. Waits for the
                device once or twice, as ``scaler.step`` does, which is not to be called, and forgets what the scaler
                knew of other optimizers: unscale and step them afterwards. ``scaler.update()`` remains the caller's.

        Returns:
            What ``closure`` returned the first time: the loss before the step.

        Raises:
            TypeError: ``closure`` is not callable.
            RuntimeError: It was called by ``scaler.step``.
        """
        self._refuse_scaled_step()
        if not callable(closure):
            self._step_without_closure(closure)
            return None
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        steps = self.param_groups[0].get(_STEPS, 0) + 1
        for group in self.param_groups:
            group[_STEPS] = steps
        looks_around = self.rho > 0 and steps % self.interval == 0

        with torch.enable_grad():
            loss = closure()
        is_finite = scaler is None or self._unscale(scaler)
        if looks_around and is_finite:
            with self._at_worst_weights():
                self.zero_grad()
                if scaler is not None:
                    self._allow_unscaling_again(scaler)
                with torch.enable_grad():
                    closure()
            is_finite = scaler is None or self._unscale(scaler)
        if is_finite:
            self.base_optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state; its groups hold the number of steps, too."""
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or what an optimizer like the wrapped one did."""
        self.base_optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.base_optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the wrapped optimizer another group."""
        self.base_optimizer.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base_optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The wrapped optimizer's state."""
        return self.base_optimizer.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.base_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.base_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.base_optimizer.defaults = defaults

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Register a hook with the wrapped optimizer, which makes the state dict."""
        return self.base_optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Register a hook with the wrapped optimizer, which makes the state dict."""
        return self.base_optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Register a hook with the wrapped optimizer, which loads the state dict."""
        return self.base_optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Register a hook with the wrapped optimizer, which loads the state dict."""
        return self.base_optimizer.register_load_state_dict_post_hook(hook, prepend)

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("base_optimizer", "rho", "epsilon", "interval")}

    def __repr__(self) -> str:
        settings = f"rho={self.rho}, epsilon={self.epsilon}, interval={self.interval}"
        return f"{type(self).__name__}({self.base_optimizer!r}, {settings})"

    @contextmanager
    def _at_worst_weights(self) -> Iterator[None]:
        """Move the weights by what is in their gradients, which is lost, and put them back bit for bit."""
        parameters = self._parameters_with_gradients()
        gradients = list_gradients(parameters)
        scale(gradients, self.rho / (measure_norm(gradients) + self.epsilon))
        weights, moves = local_parts(parameters), local_parts(gradients)
        kept = [torch.empty_like(weight) for weight in weights]
        if weights:
            torch._foreach_copy_(kept, weights)
            torch._foreach_add_(weights, moves)
        del gradients, moves  # their memory is needed for the next ones
        try:
            yield
        finally:
            if weights:
                torch._foreach_copy_(weights, kept)

    def _parameters_with_gradients(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"] if each.grad is not None]

    def _unscale(self, scaler: torch.amp.GradScaler) -> bool:
        """Give the gradients their true size, and return whether they are finite."""
        try:
            scaler.unscale_(self)
        except RuntimeError as error:
            # The closure did it; there is no public way to ask.
            if "already been called" not in str(error):
                raise
        return bool(measure_norm(list_gradients(self._parameters_with_gradients())).isfinite())

    def _allow_unscaling_again(self, scaler: torch.amp.GradScaler) -> None:
        # An update to the scale that it has makes the scaler forget that it unscaled these gradients, and nothing else.
        first = next(parameter for group in self.param_groups for parameter in group["params"])
        scaler.update(scaler.scale(torch.ones((), device=first.device)))

    def _refuse_scaled_step(self) -> None:
        if vars(self).pop("grad_scale", None) is not None:
            del vars(self)["found_inf"]
            raise RuntimeError(
                "SAMOptimizer computes gradients itself, and scaler.step(optimizer, closure) expects them to be there. "
                "Call optimizer.step(closure, scaler) and then scaler.update()."
            )

    def _step_without_closure(self, closure: object) -> None:
        # torch.distributed.checkpoint lets optimizers make their state by such a step.
        if closure is None and all(group.get("lr", 1) == 0 for group in self.param_groups):
            self.base_optimizer.step()
            return
        raise TypeError(
            f"closure must be a function that computes loss and gradients anew, got {type(closure).__name__}. "
            "SAM needs the gradients at two places in a step: optimizer.step(closure)."
        )


def _check_base_optimizer(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"base_optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"base_optimizer must step by gradients that are there, got {type(optimizer).__name__}, "
            "which needs a closure itself. Use it alone, or wrap another one, as torch.optim.SGD."
        )


def _check_settings(rho: float, epsilon: float, interval: int) -> None:
    check_numbers(rho=rho, epsilon=epsilon)
    check_whole_numbers(interval=interval)
    if not 0 <= rho < math.inf:
        raise ValueError(f"rho must be at least 0, got {rho}. It is how far away the worst weights are looked for.")
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be above 0, got {epsilon}. It keeps the division by the norm from failing.")
    if interval < 1:
        raise ValueError(f"interval must be at least 1, got {interval}. It is a number of steps.")

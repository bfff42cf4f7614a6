"""SAM: sharpness-aware minimization (Foret et al. 2020, arXiv:2010.01412)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from composer.functional.checks import check_interval, check_whole
from composer.functional.dtensors import local_parts
from composer.functional.training.gradient_clipping import list_gradients, measure_norm, scale

_STEPS = "sam_steps"
# In the signature, which loops inspect, the closure has no default; without one, `step` raises its own errors.
_REQUIRED = inspect.Parameter.empty


def _of_base(name: str, doc: str) -> Any:
    """Return a property for an attribute of the wrapped optimizer."""

    def get(optimizer: SAMOptimizer) -> Any:
        return getattr(optimizer.base_optimizer, name)

    def set_(optimizer: SAMOptimizer, value: Any) -> None:
        setattr(optimizer.base_optimizer, name, value)

    return property(get, set_, doc=doc)


class SAMOptimizer(Optimizer):
    """Sharpness-aware minimization around any optimizer (arXiv:2010.01412).

    ``weights + rho * gradient / (norm(gradient) + epsilon)`` approximates the point with the highest loss within
    ``rho``. The wrapped optimizer steps from the weights along the gradient at this point. The norm is that of all
    gradients together.

    Groups, state and defaults are those of the wrapped optimizer, so schedulers and surgery accept either. The state
    dict is that of the wrapped optimizer, with the number of steps as ``sam_steps`` in each group: each can load the
    state of the other.

    Args:
        base_optimizer: The optimizer that steps; its own ``step`` must not need a closure.
        rho: The radius of the neighbourhood, at least 0; 0 is the wrapped optimizer alone.
        epsilon: Added to the norm, by which gradients are divided; above 0.
        interval: The interval of SAM steps, at least 1. The others are steps of the wrapped optimizer.

    Attributes:
        base_optimizer: The wrapped optimizer.

    Raises:
        TypeError: ``base_optimizer`` is not an optimizer or needs a closure, or ``interval`` is not an int.
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

    # With it GradScaler sets the scale for `step`, which raises an error with the correct call.
    _step_supports_amp_scaling = True

    def __init__(self, base_optimizer: Optimizer, rho: float = 0.05, epsilon: float = 1e-12, interval: int = 1) -> None:
        _check_base_optimizer(base_optimizer)
        check_interval("rho", rho, 0, math.inf, "It is the radius of the neighbourhood.", open_high=True)
        check_interval("epsilon", epsilon, 0, math.inf, "It is added to a norm.", open_low=True, open_high=True)
        check_whole("interval", interval, 1, "It is a number of steps.")
        self.base_optimizer = base_optimizer
        self.rho = rho
        self.epsilon = epsilon
        self.interval = interval
        # Optimizer.__init__ would create its own groups; this initialises the hooks, as after unpickling.
        self.__setstate__({})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = _REQUIRED, scaler: torch.amp.GradScaler | None = None) -> Any:
        """Update the weights, every ``interval``-th time by the gradient at the point with the highest loss nearby.

        Args:
            closure: Clears the gradients, computes the loss and its gradients (of several microbatches, if needed)
                and returns the loss. Called once or twice. ``None`` raises an error, unless all learning rates are 0.
            scaler: The scaler of the loss in ``closure``, which may call ``scaler.unscale_`` on this optimizer, in
                order to clip; otherwise this method unscales the gradients. The step is skipped if gradients are not
                finite. It synchronises with the device once or twice, like ``scaler.step``, which must not be called,
                and resets the scaler's state for other optimizers: unscale and step them afterwards. The caller calls
                ``scaler.update()``.

        Returns:
            The result of the first call of ``closure``: the loss before the step.

        Raises:
            TypeError: ``closure`` is not callable.
            RuntimeError: It was called by ``scaler.step``.
        """
        self._reject_scaled_step()
        if closure is _REQUIRED or not callable(closure):
            self._step_without_closure(None if closure is _REQUIRED else closure)
            return None
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        # In the groups, which every optimizer saves: the state dict remains that of the wrapped optimizer.
        steps = self.param_groups[0].get(_STEPS, 0) + 1
        for group in self.param_groups:
            group[_STEPS] = steps
        is_sam_step = self.rho > 0 and steps % self.interval == 0

        with torch.enable_grad():
            loss = closure()
        is_finite = scaler is None or self._unscale(scaler)
        if is_sam_step and is_finite:
            with self._at_highest_loss():
                self.zero_grad()
                if scaler is not None:
                    # An update to the current scale only resets the scaler's record of unscaled gradients.
                    first = next(parameter for group in self.param_groups for parameter in group["params"])
                    scaler.update(scaler.scale(torch.ones((), device=first.device)))
                with torch.enable_grad():
                    closure()
            is_finite = scaler is None or self._unscale(scaler)
        if is_finite:
            self.base_optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state; its groups contain the number of steps."""
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a ``SAMOptimizer``, or of an optimizer like the wrapped one."""
        self.base_optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.base_optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.base_optimizer.add_param_group(param_group)

    param_groups = _of_base("param_groups", "The wrapped optimizer's groups.")
    state = _of_base("state", "The wrapped optimizer's state.")
    defaults = _of_base("defaults", "The wrapped optimizer's defaults.")

    # The wrapped optimizer makes and loads the state dict, so it calls the hooks.
    register_state_dict_pre_hook = _of_base("register_state_dict_pre_hook", "As that of the wrapped optimizer.")
    register_state_dict_post_hook = _of_base("register_state_dict_post_hook", "As that of the wrapped optimizer.")
    register_load_state_dict_pre_hook = _of_base(
        "register_load_state_dict_pre_hook", "As that of the wrapped optimizer."
    )
    register_load_state_dict_post_hook = _of_base(
        "register_load_state_dict_post_hook", "As that of the wrapped optimizer."
    )

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("base_optimizer", "rho", "epsilon", "interval")}

    def __repr__(self) -> str:
        settings = f"rho={self.rho}, epsilon={self.epsilon}, interval={self.interval}"
        return f"{type(self).__name__}({self.base_optimizer!r}, {settings})"

    @contextmanager
    def _at_highest_loss(self) -> Iterator[None]:
        """Move the weights to the highest loss nearby, discard the gradients, and restore the weights bit for bit."""
        parameters = self._parameters_with_gradients()
        gradients = list_gradients(parameters)
        # Equation 2 of the paper, in place: these gradients are not needed any more.
        scale(gradients, self.rho / (measure_norm(gradients) + self.epsilon))
        weights = local_parts(parameters)
        moves = local_parts([each.grad for each in parameters if each.grad is not None])  # also those that are sparse
        # Copies, because subtracting the move afterwards would leave rounding errors in the weights.
        copies = [torch.empty_like(weight) for weight in weights]
        if weights:
            torch._foreach_copy_(copies, weights)
            torch._foreach_add_(weights, moves)
        del gradients, moves  # free their memory for the next ones
        try:
            yield
        finally:
            if weights:
                torch._foreach_copy_(weights, copies)

    def _parameters_with_gradients(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"] if each.grad is not None]

    def _unscale(self, scaler: torch.amp.GradScaler) -> bool:
        """Unscale the gradients, and return whether they are finite."""
        if not self._parameters_with_gradients():
            return True  # unscaled, they would be recorded until an update, which the scaler rejects without gradients
        try:
            scaler.unscale_(self)
        except RuntimeError as error:
            # The closure has unscaled them; there is no public way to check.
            if "already been called" not in str(error):
                raise
        return bool(measure_norm(list_gradients(self._parameters_with_gradients())).isfinite())

    def _reject_scaled_step(self) -> None:
        # GradScaler.step sets these two attributes before it calls `step`.
        if vars(self).pop("grad_scale", None) is not None:
            del vars(self)["found_inf"]
            raise RuntimeError(
                "SAMOptimizer computes gradients itself, and scaler.step(optimizer, closure) expects existing ones. "
                "Call optimizer.step(closure, scaler) and then scaler.update()."
            )

    def _step_without_closure(self, closure: object) -> None:
        # torch.distributed.checkpoint initialises the state of optimizers by such a step.
        if closure is None and all(group.get("lr", 1) == 0 for group in self.param_groups):
            self.base_optimizer.step()
            return
        raise TypeError(
            f"closure must be a function that computes loss and gradients again, got {type(closure).__name__}. "
            "SAM needs the gradients at two points in a step: optimizer.step(closure)."
        )


def _check_base_optimizer(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"base_optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"base_optimizer must step with existing gradients, got {type(optimizer).__name__}, "
            "which needs a closure itself. Use it alone, or wrap another one, such as torch.optim.SGD."
        )

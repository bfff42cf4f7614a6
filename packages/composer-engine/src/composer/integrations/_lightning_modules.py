"""Finds the modules that the training_step of a LightningModule calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from composer.core.step import StopStep

__all__ = ["callable_children", "first_called", "reject_call"]


def callable_children(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and its children with parameters, by name; those of a container in its place."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        yield name, module
    if not name or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for key, child in module.named_children():
            if next(child.parameters(), None) is not None:
                yield from callable_children(child, f"{name}.{key}" if name else key)


def first_called(modules: Iterable[nn.Module], step: Callable[[], Any], device: torch.device) -> nn.Module | None:
    """Return the first of some modules that a step calls; it ends there, and draws nothing from torch's generators."""

    def stop(module: nn.Module, _: Any) -> None:
        raise StopStep(module)

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(stop).remove)
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        try:
            step()
        except StopStep as stopped:
            return cast("nn.Module", stopped.args[0])
    return None


def reject_call(names: Mapping[int, str], chosen: str, called: nn.Module, _: Any) -> None:
    """Raise an error for a module that is called after the chosen one."""
    raise ValueError(
        f"training_step calls {chosen!r} and {names[id(called)]!r}, so it is not clear with which outputs the loss is "
        "computed. Call both in forward() and self(...) in training_step, or pass "
        f"ComposerCallback(..., module={chosen!r})."
    )

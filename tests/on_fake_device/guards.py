"""What a step on the device may not do: wait for it, or compute in float64 on it."""

import contextlib
import ctypes
import importlib.util
import re
import traceback
import warnings
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["EXCEPTIONS", "Calls", "cases_of", "devices", "is_there", "ordered", "standard_attention", "step"]

EXCEPTIONS = {
    r"test_optimizer\[Adafactor": (16, "Torch's Adafactor reads the norms of each weight and of its update."),
    r"test_optimizer\[ASGD": (16, "Torch's ASGD reads its step."),
    r"test_optimizer\[LBFGS": (28, "Torch's LBFGS reads the loss and the gradients."),
    r"test_sparse_adam": (20, "Torch counts the rows of a sparse gradient to add up those of the same token."),
    r"test_loss_scaling\[foreach": (4, "Torch's scaler reads its flag before optimizers that are not fused."),
    r"test_algorithm\[PostHocEMA\]": (90, "A snapshot waits for copies of the averages, at its interval."),
    r"test_algorithm\[PostHocEMA-": (200, "The same with the Trainer."),
    r"(augment|colout)_batch, annotated": (1, "The sizes of the results are the numbers of boxes that stay."),
    r"(cutmix|mixup)_batch, annotated": (2, "The same, and lists of labels are joined by the order of the partners."),
}
"""Tests that wait within steps, by a pattern of their names: how many times, and the reason. At most ten lines."""

EXEMPT = re.compile("grad_scaler|float8_utils")
_LIBRARY = ctypes.CDLL(None)


def is_there():
    """Return whether the stand-in is loaded in this process."""
    return hasattr(_LIBRARY, "fake_device_waits")


def devices(values):
    """Return the types of the devices of all tensors in nested values."""
    return {one.device.type for one in tree_leaves(values) if isinstance(one, torch.Tensor)}


def cases_of(path):
    """Return the module of a package's tests, whose cases are used here, too."""
    file = Path(__file__).parents[2] / "packages" / path
    spec = importlib.util.spec_from_file_location(f"cases_of_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NoFloat64(TorchDispatchMode):
    """Raises an error for an operation with a result in float64 on the device, which computes it at 1/64 the speed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        on_device = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor) and one.is_cuda]
        is_wide = any(one.dtype in (torch.float64, torch.complex128) for one in on_device)
        # torch's scaler and torchao's layers for 8 bits invert one number in float64.
        if is_wide and not any(EXEMPT.search(frame.filename) for frame in traceback.extract_stack(limit=20)):
            raise TypeError(f"{func} has computed in float64 on the device.")
        return result


@contextlib.contextmanager
def step(*, may_wait=False):
    """Raise an error if the code inside waits for the device, or computes in float64 on it; yield a list of waits."""
    before, waits = _LIBRARY.fake_device_waits(), []
    with warnings.catch_warnings(), NoFloat64():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("default" if may_wait else "error")  # an error shows the line that waits
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # That mode overlooks what waits for a stream or an event.
    waits.append(_LIBRARY.fake_device_waits() - before)
    assert may_wait or not waits[0], f"The host has waited {waits[0]} times for a stream or an event."


class Calls:
    """The calls of the runtime since the start: a name, the number of the stream or event, and another number."""

    def __call__(self, *names):
        """Return all calls, or those of some names."""
        _LIBRARY.fake_device_calls.restype = ctypes.c_char_p
        calls = [line.split() for line in _LIBRARY.fake_device_calls().decode().splitlines()]
        return [(name, int(one), int(other)) for name, one, other in calls if not names or name in names]

    def names(self, *names):
        """Return their names only."""
        return [name for name, *_ in self(*names)]


@contextlib.contextmanager
def ordered():
    """Copy only when the host waits for a copy, so that reading too early finds zeros, and yield the calls."""
    _LIBRARY.fake_device_delay(1)
    _LIBRARY.fake_device_log(1)
    try:
        yield Calls()
    finally:
        _LIBRARY.fake_device_log(0)
        _LIBRARY.fake_device_delay(0)


def standard_attention(model):
    """Return a model, whose parts of Transformers build each mask: with their default, they read that of the batch."""
    for module in model.modules():
        if hasattr(module, "set_attn_implementation"):
            module.set_attn_implementation("eager")
    return model

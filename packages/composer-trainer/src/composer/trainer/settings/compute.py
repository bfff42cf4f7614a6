"""The device, precision, compilation and microbatch size of a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from composer.core import Precision
from composer.core.checks import by_name, caller_level, is_flag, nearest
from composer.distributed import device_of_process
from composer.functional.training.orthogonalization import product_dtype
from composer.loggers.products import import_product

_AVAILABLE: dict[str, Callable[[], bool]] = {
    "cpu": lambda: True,
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
}


def check_microbatch_size(name: str, size: object) -> None:
    """Raise a ValueError for a size that is neither None, nor ``"auto"``, nor an integer of at least 1."""
    wrong = size is not None and size != "auto"
    if wrong and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(f"{name} must be None, 'auto' or a number of samples, at least 1, got {size!r}.")


def _check_config(name: str, config: object) -> None:
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"{name} must be a dictionary of arguments, got {config!r}; {{}} takes all defaults.")


@attrs.frozen
class Compute:
    """The arguments of a :class:`~composer.Trainer` about how it computes; see there.

    Attributes:
        device: The device of this process.
        precision: The precision, which is that of the device by default.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: An argument is out of range, or two contradict each other.
    """

    _device: str | torch.device | None
    _precision: str | Precision | None
    precision_config: Mapping[str, Any] | None = attrs.field(validator=by_name(_check_config))
    microbatch_size: int | str | None = attrs.field(
        alias="device_train_microbatch_size", validator=by_name(check_microbatch_size)
    )
    weighs_by_tokens: bool = attrs.field(alias="accumulate_train_batch_on_tokens", validator=is_flag)
    is_deterministic: bool = attrs.field(alias="deterministic_mode", validator=is_flag)
    compile_config: Mapping[str, Any] | None = attrs.field(validator=by_name(_check_config))
    device: torch.device = attrs.field(init=False)
    precision: Precision = attrs.field(init=False)

    @device.default
    def _choose_device(self) -> torch.device:
        return device_of_process(choose_device(self._device))

    @precision.default
    def _choose_precision(self) -> Precision:
        return choose_precision(self._precision, self.device)

    def __attrs_post_init__(self) -> None:
        if self.precision_config is not None and self.precision is not Precision.AMP_FP8:
            raise ValueError(
                f"precision_config is only for precision='amp_fp8', and precision is '{self.precision}': leave it out."
            )
        if self.precision is Precision.AMP_BF16 and product_dtype(self.device) is torch.float32:
            warnings.warn(
                "precision='amp_bf16' is many times slower than 'fp32' on this CPU, which has no AVX-512: use 'fp32'.",
                stacklevel=caller_level(),
            )

    def prepare(self, model: nn.Module) -> None:
        """Convert the model's linear layers for ``"amp_fp8"``; weights and their names do not change."""
        if self.precision is not Precision.AMP_FP8:
            return
        float8 = import_product("torchao.float8", "fp8")
        settings = dict(self.precision_config or {})
        recipe = settings.pop("recipe", None)
        kind = float8.Float8LinearConfig
        config = kind.from_recipe_name(recipe) if recipe else kind(**settings)
        before = sum(1 for _ in model.modules())
        float8.convert_to_float8_training(model, config=config, module_filter_fn=_fits_fp8)
        if not any("Float8" in type(module).__name__ for module in model.modules()):
            warnings.warn(
                f"precision='amp_fp8' changed none of the model's {before} modules: 8-bit products need linear layers "
                "whose widths are multiples of 16. The rest computes as with 'amp_bf16'.",
                stacklevel=3,
            )

    def compile(self, model: nn.Module) -> None:
        """Compile the model in place if configured; the names of its weights do not change."""
        if self.compile_config is not None:
            model.compile(**self.compile_config)


def _fits_fp8(module: nn.Module, name: str) -> bool:
    del name
    return isinstance(module, torch.nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """Return a device by its name (``"gpu"`` is a CUDA device), or the best available device.

    Raises:
        ValueError: The device does not exist on this machine, or its type is not supported.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
    """
    if device is None:
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if _AVAILABLE[kind]()))
    try:
        chosen = torch.device("cuda" if device == "gpu" else device)
    except RuntimeError:
        hint = nearest(device, ("gpu", *_AVAILABLE))
        raise ValueError(
            f"device must be 'cpu', 'cuda' (also 'gpu'), 'mps' or a torch.device, got {device!r}{hint}"
        ) from None
    if chosen.type not in _AVAILABLE or not _AVAILABLE[chosen.type]():
        usable = [kind for kind, is_available in _AVAILABLE.items() if is_available()]
        raise ValueError(f"device={str(device)!r} cannot be used here; this machine has {', '.join(usable)}.")
    return chosen


def choose_precision(precision: Precision | str | None, device: torch.device) -> Precision:
    """Return a precision by its name; by default ``amp_fp16`` on a CUDA device and ``fp32`` elsewhere.

    Raises:
        ValueError: The precision is unknown.
    """
    if precision is None:
        return Precision.AMP_FP16 if device.type == "cuda" else Precision.FP32
    return Precision(precision)

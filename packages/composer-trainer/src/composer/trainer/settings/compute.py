"""The device, precision, compilation and microbatch size of a run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

from composer.core import Precision
from composer.distributed import device_of_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["ComputeConfig", "check_microbatch_size", "choose_device", "choose_precision"]

_FP8_CAPABILITY = (8, 9)
_AVAILABLE: dict[str, Callable[[], bool]] = {
    "cpu": lambda: True,
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
}


@attrs.frozen
class ComputeConfig:
    """How a model computes.

    Args:
        device: The device.
        precision: The precision.
        precision_config: Settings of torchao's ``Float8LinearConfig``, or ``{"recipe": name}`` of one of its recipes.
        compile_config: Arguments of ``torch.nn.Module.compile``; None does not compile.
        microbatch_size: The number of samples in a microbatch, ``"auto"``, or None for complete batches.
    """

    device: torch.device
    precision: Precision
    precision_config: dict[str, Any] | None = None
    compile_config: dict[str, Any] | None = None
    microbatch_size: int | str | None = None

    @classmethod
    def make(
        cls,
        device: str | torch.device | None,
        precision: str | Precision | None,
        precision_config: Mapping[str, Any] | None,
        compile_config: Mapping[str, Any] | None,
        microbatch_size: int | str | None,
    ) -> ComputeConfig:
        """Return the validated settings.

        Raises:
            ValueError: One of them is out of range, or two contradict each other.
            ImportError: ``precision="amp_fp8"`` needs torchao, which is not installed.
        """
        chosen = device_of_process(choose_device(device))
        made = cls(
            chosen,
            choose_precision(precision, chosen),
            _checked_config("precision_config", precision_config),
            _checked_config("compile_config", compile_config),
            check_microbatch_size(microbatch_size),
        )
        if made.precision is Precision.AMP_FP8:
            made.check_fp8()
        elif made.precision_config is not None:
            raise ValueError(
                f"precision_config is only for precision='amp_fp8', and precision is '{made.precision}': leave it out."
            )
        return made

    def check_fp8(self) -> None:
        """Raise an error if this device cannot compute in 8 bits."""
        emulated = (self.precision_config or {}).get("emulate", False)
        if not emulated and (self.device.type != "cuda" or torch.cuda.get_device_capability() < _FP8_CAPABILITY):
            raise ValueError(
                f"precision='amp_fp8' needs a GPU with 8-bit matrix products (H100 or later), and the device is "
                f"'{self.device}'. Use 'amp_bf16', or precision_config={{'emulate': True}} to try it out."
            )
        try:
            import torchao  # noqa: F401, PLC0415  (an extra)
        except ImportError:
            raise ImportError(
                "precision='amp_fp8' needs torchao: pip install 'composer-trainer[fp8]', or use 'amp_bf16'."
            ) from None

    def prepare(self, model: nn.Module) -> None:
        """Convert the model's linear layers for ``"amp_fp8"``; weights and their names do not change."""
        if self.precision is not Precision.AMP_FP8:
            return
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415  (an extra)

        settings = dict(self.precision_config or {})
        recipe = settings.pop("recipe", None)
        config = Float8LinearConfig.from_recipe_name(recipe) if recipe else Float8LinearConfig(**settings)
        before = sum(1 for _ in model.modules())
        convert_to_float8_training(model, config=config, module_filter_fn=_fits_fp8)
        if not any("Float8" in type(module).__name__ for module in model.modules()):
            warnings.warn(
                f"precision='amp_fp8' changed none of the model's {before} modules: 8-bit products need linear layers "
                "whose widths are multiples of 16. The rest computes as with 'amp_bf16'.",
                UserWarning,
                stacklevel=3,
            )

    def compile(self, model: nn.Module) -> None:
        """Compile the model in place if configured; the names of its weights do not change."""
        if self.compile_config is not None:
            model.compile(**self.compile_config)


def check_microbatch_size(size: int | str | None) -> int | str | None:
    """Return the size.

    Raises:
        ValueError: The size is neither None, nor ``"auto"``, nor an integer of at least 1.
    """
    wrong = size is not None and size != "auto"
    if wrong and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(
            f"device_train_microbatch_size must be None, 'auto' or a number of samples, at least 1, got {size!r}."
        )
    return size


def _checked_config(name: str, config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise TypeError(f"{name} must be a dictionary of arguments, got {config!r}; {{}} takes all defaults.")
    return dict(config)


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
        raise ValueError(f"device must be 'cpu', 'gpu', 'mps' or a torch.device, got {device!r}.") from None
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

"""Activation checkpointing: compute activations again in the backward pass, to save their memory (arXiv:1604.06174)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import dynamo together with this module
from torch.torch_version import TorchVersion

from composer.functional.checks import check_choice, check_modules, check_whole, described, is_module_class
from composer.functional.layers.derived import DerivedModule, plain_class
from composer.functional.layers.gyro_dropout import GyroDropout
from composer.functional.layers.noisy_embedding import NoisyEmbedding
from composer.functional.surgery.blocks import chosen_modules, is_one_of, repeated_blocks
from composer.functional.surgery.replace import SurgeryReport, replace_layers

if TYPE_CHECKING:
    Context = contextlib.AbstractContextManager[Any]
    Contexts = tuple[Context, Context]

Blocks = str | type[nn.Module] | Sequence[str | type[nn.Module]] | None

_MARKS = ("gradient_checkpointing", "grad_checkpointing")


# The attention kernels of the CPU, of CUDA (three) and of other devices.
_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution")
_MATMULS = [
    getattr(torch.ops.aten, name).default
    for name in (*_PRODUCTS, *(f"_scaled_dot_product_{kind}" for kind in _ATTENTION))
]
# In a compiled graph, earlier versions of torch update statistics again in the backward pass.
_UPDATES_AGAIN = TorchVersion(torch.__version__) < "2.9"


class CheckpointedBlock(DerivedModule):
    """A block that stores its inputs in training, and computes its activations again in the backward pass.

    Outputs and gradients are those of the plain block bit for bit: generators and autocast are restored for the second
    computation, and the running statistics of norms are updated by the first only. Before torch 2.9, a block with such
    statistics is not compiled. Without gradients and in evaluation the plain block is computed.

    Attributes:
        policy: ``"full"`` computes everything again; ``"matmuls"`` stores the results of matrix products, convolutions
            and attention kernels.
    """

    prefix: ClassVar = "Checkpointed"
    policy: str
    _is_checked: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block."""
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        if _UPDATES_AGAIN and torch.compiler.is_compiling() and self._has_statistics():
            return self._forward_eagerly(*args, **kwargs)
        from torch.utils.checkpoint import checkpoint  # noqa: PLC0415  (torch 2.7 imports sympy with it)

        if not getattr(self, "_can_checkpoint_with_cache", False):  # layers of Transformers that only read it
            args = tuple(map(self._without_cache, args))
            kwargs = {name: self._without_cache(value) for name, value in kwargs.items()}
        options: dict[str, Any] = {"context_fn": _save_matmuls} if self.policy == "matmuls" else {}
        if torch.compiler.is_compiling():  # a compiled graph updates the statistics once, at its end
            return checkpoint(super().forward, *args, use_reentrant=False, **options, **kwargs)
        before = [] if self._is_checked else _versions(self)
        options = {"context_fn": functools.partial(_with_statistics_kept, self, **options)}
        outputs = checkpoint(super().forward, *args, use_reentrant=False, **options, **kwargs)
        for name, version, buffer in before:
            if buffer._version != version:  # noqa: SLF001
                raise ValueError(
                    f"{plain_class(self).__name__} must not change its buffer {name!r} in its forward pass with "
                    "activation checkpointing: the backward pass would change it again, and compute something else. "
                    "Choose other modules."
                )
        self._is_checked = True
        return outputs

    def _has_statistics(self) -> bool:
        return any(name.endswith("running_mean") for name, _ in self.named_buffers())

    @_disable_dynamo
    def _forward_eagerly(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def _without_cache(self, argument: Any) -> Any:
        """Return None for an empty cache of keys and values, to which a layer would add them twice."""
        count: Callable[[], int] | None = getattr(argument, "get_seq_length", None)
        if not callable(count):
            return argument
        if int(count()) > 0:
            raise ValueError(
                f"{plain_class(self).__name__} must not get a cache with keys and values in training with activation "
                f"checkpointing, got one of {int(count())} tokens: the backward pass would add them again. Set "
                "model.config.use_cache = False."
            )
        return None


def _versions(block: nn.Module) -> list[tuple[str, int, Tensor]]:
    """Return the names of buffers, how often each was changed in place, and these, except for running statistics."""
    buffers = (
        (f"{prefix}.{name}".lstrip("."), buffer)
        for prefix, module in block.named_modules()
        if "running_mean" not in vars(module)["_buffers"]
        for name, buffer in module.named_buffers(recurse=False)
    )
    return [(name, one._version, one) for name, one in buffers if not one.is_inference()]  # noqa: SLF001


def _save_matmuls() -> Contexts:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts  # noqa: PLC0415  (as above)

    contexts: Contexts = create_selective_checkpoint_contexts(_MATMULS)  # type: ignore[no-untyped-call]
    return contexts


def _with_statistics_kept(block: nn.Module, context_fn: Callable[[], Contexts] | None = None) -> Contexts:
    first, second = context_fn() if context_fn else (contextlib.nullcontext(), contextlib.nullcontext())
    return first, _kept_statistics(block, second)


@contextlib.contextmanager
def _kept_statistics(block: nn.Module, context: Context) -> Iterator[None]:
    """Let norms update copies of their running statistics, within another context."""
    buffers = [one for module in block.modules() if "running_mean" in (one := vars(module)["_buffers"])]
    kept = [dict(one) for one in buffers]
    for one in buffers:
        one.update({name: value.clone() for name, value in one.items() if isinstance(value, Tensor)})
    try:
        with context:
            yield
    finally:
        for one, before in zip(buffers, kept, strict=True):
            one.update(before)


def apply_activation_checkpointing(
    model: nn.Module, modules: Blocks = None, every: int = 1, policy: str = "full"
) -> SurgeryReport:
    """Let blocks compute their activations again in the backward pass instead of storing them, in place.

    A checkpointed block stores its inputs in the forward pass (Chen et al. 2016, arXiv:1604.06174), by
    ``torch.utils.checkpoint.checkpoint``. Of ``L`` equal blocks with activations of size ``a`` and inputs of size
    ``i``, ``L a`` becomes ``L i + a``, for one more forward pass of the blocks. Outputs and gradients do not change by
    a bit, also with dropout. Running statistics of norms are updated once per step. Parameters keep their names, so
    checkpoints of the plain model can be loaded, and vice versa.

    Call it before ``torch.compile`` and before ``fully_shard``. A cache of keys and values that a model of Transformers
    creates in training is not passed to the blocks.

    Args:
        model: The model; **changed in place**.
        modules: The blocks: a class, its name, or several of them. By default those that a model of Transformers names
            in ``_no_split_modules``, and of other models the repeated blocks: the outermost modules with children whose
            class occurs several times in lists and sequences of the model.
        every: Change the first of so many blocks: with 2, half of them.
        policy: ``"full"`` stores inputs of blocks only. ``"matmuls"`` also stores the results of matrix products,
            convolutions and attention kernels, and computes the cheap rest again. A result that a block changes in
            place, such as by ``nn.ReLU(inplace=True)`` after a convolution, raises an error of torch there.

    Returns:
        A report of the changed blocks; empty if there are none.

    Raises:
        TypeError: ``model`` is not a module, ``modules`` contains neither classes nor names, or ``every`` is no
            integer.
        ValueError: ``every`` is less than 1, ``policy`` is unknown, the model already computes layers again, or a block
            contains a layer whose forward pass changes its next one: GyroDropout, NEFTune's embedding, or a spectral
            norm. In the first training step: a block changes a buffer other than running statistics of norms.

    Example:
        >>> model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2) for _ in range(4)))
        >>> print(apply_activation_checkpointing(model, every=2))
        2 modules replaced
          0: TransformerEncoderLayer -> CheckpointedTransformerEncoderLayer
          2: TransformerEncoderLayer -> CheckpointedTransformerEncoderLayer
    """
    check_modules(model=model)
    classes = to_classes(modules)
    check_whole("every", every, 1, "It is the distance from one checkpointed block to the next.")
    check_choice("policy", policy, "full", "matmuls")
    check_not_recomputed(model)
    found = repeated_blocks(model) if classes is None else chosen_modules(model, is_one_of(classes), outermost=True)
    blocks = [block for _, block in found if not isinstance(block, CheckpointedBlock)][::every]
    for block in blocks:
        _check_stateless(block)
    wanted = {*blocks}
    return replace_layers(
        model, {nn.Module: lambda block, _: CheckpointedBlock.take_over(block, policy=policy)}, wanted.__contains__
    )


def to_classes(modules: Any) -> tuple[str | type[nn.Module], ...] | None:
    """Return classes of modules, or their names, as a tuple; None remains None.

    Raises:
        TypeError: ``modules`` contains something else, or nothing.
    """
    listed = (modules,) if isinstance(modules, (str, type)) else modules
    if listed is None:
        return None
    is_list = isinstance(listed, Sequence) and len(listed) > 0
    if not is_list or not all(isinstance(one, str) or is_module_class(one) for one in listed):
        raise TypeError(f"modules must be None, or classes of modules or their names, got {described(modules)}.")
    return tuple(listed)


def check_not_recomputed(model: nn.Module) -> None:
    """Raise a ValueError for a model that already computes layers again in the backward pass."""
    name = find_recomputed(model)
    if name is not None:
        raise ValueError(
            f"model must not use other gradient checkpointing, as {name!r} does. Disable it, for example by "
            "model.gradient_checkpointing_disable() or gradient_checkpointing=False, or leave out this one."
        )


def find_recomputed(model: nn.Module) -> str | None:
    """Return the name of a module that is computed again in the backward pass by the model itself, or None.

    Models of Transformers, timm and torch mark them.
    """
    for name, module in model.named_modules():
        if any(getattr(module, mark, False) for mark in _MARKS) or hasattr(module, "_checkpoint_wrapped_module"):
            return name or type(model).__name__
    return None


def _check_stateless(block: nn.Module) -> None:
    for name, module in block.named_modules():
        if isinstance(module, (GyroDropout, NoisyEmbedding)) or type(module).__name__ == "_SpectralNorm":
            raise ValueError(
                f"model must not have {type(module).__name__.strip('_')} in a checkpointed block, as {name!r} is: each "
                "forward pass changes its next one, and the backward pass runs another. Choose other modules."
            )

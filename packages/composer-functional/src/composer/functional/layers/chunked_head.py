"""A linear layer that computes its logits only for the loss, a chunk at a time (arXiv:2411.09009)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import dynamo together with this module
from torch.nn.functional import linear
from torch.utils._pytree import tree_map_only

from composer.functional.checks import check_flags, check_sizes
from composer.functional.dtensors import is_dtensor
from composer.functional.linear_cross_entropy import check_head_settings, linear_cross_entropy, softcap


class ChunkedHead(nn.Linear):
    """A ``torch.nn.Linear`` whose logits are not stored for the cross entropy (arXiv:2411.09009).

    In training it returns logits that are computed when they are used. Slicing and reshaping without the last
    dimension, casts, a factor and ``tanh`` do not use them, and ``torch.nn.functional.cross_entropy`` of rows
    ``(N, C)`` computes :func:`~composer.functional.linear_cross_entropy` of the inputs. So it works in models that
    compute the loss in their ``forward``, as those of Transformers. Every other operation computes all logits, with a
    warning if gradients are enabled, as they then need the memory of the usual head; changing them in place raises an
    error.

    In evaluation, and in ``torch.export``, it is a ``torch.nn.Linear`` with the limit. ``torch.compile`` breaks its
    graph at the head and at each operation on the logits, unless ``has_loss_in_forward`` is True: then the head returns
    an object in a compiled model, on which the same operations and the cross entropy are part of the graph.

    Shape: ``(..., in_features)`` to ``(..., out_features)``.

    Args:
        in_features: As for ``torch.nn.Linear``.
        out_features: The number of classes.
        bias: Whether there is a bias.
        chunk_size: See :func:`~composer.functional.linear_cross_entropy`.
        z_loss: The factor of the z-loss, which is added to the cross entropy if gradients are enabled.
        softcap: The limit of the logits, also in evaluation; see :func:`~composer.functional.softcap`.

    Attributes:
        has_loss_in_forward: Whether the ``forward`` of the model computes the loss, as of models of Transformers.

    Raises:
        ValueError: A setting is out of range; or in ``forward`` the weight is a DTensor, as with tensor parallelism.
        RuntimeError: Logits are changed in place, or used after a step has changed the weight or FSDP2 has released it.

    Example:
        >>> head = ChunkedHead(8, 100)
        >>> logits, labels = head(torch.rand(2, 3, 8)), torch.zeros(2, 3, dtype=torch.long)
        >>> loss = torch.nn.functional.cross_entropy(logits.view(-1, 100), labels.view(-1))
        >>> logits.shape, loss.shape, type(head.eval()(torch.rand(2, 8))).__name__
        (torch.Size([2, 3, 100]), torch.Size([]), 'Tensor')
    """

    has_loss_in_forward = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        chunk_size: int | None = None,
        z_loss: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        check_sizes(in_features=in_features, out_features=out_features)
        check_flags(bias=bias)
        check_head_settings(chunk_size, z_loss, softcap)
        super().__init__(in_features, out_features, bias)
        self.chunk_size, self.z_loss, self.softcap = chunk_size, z_loss, softcap

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits, in training such as are computed when they are used."""
        if not self.training or torch.compiler.is_exporting():  # which is True in every graph of torch 2.7
            logits = linear(input, self.weight, self.bias)
            return logits if self.softcap is None else softcap(logits, self.softcap)
        fields = self._fields(input)
        if self.has_loss_in_forward and torch.compiler.is_compiling():
            return TracedLogits(**fields)  # type: ignore[return-value]  # a Tensor would be a break of the graph
        return _deferred(**fields)

    def _fields(self, input: Tensor) -> dict[str, Any]:
        """Return what logits of an input are computed from."""
        if is_dtensor(self.weight):
            raise ValueError(
                f"The head of {self.out_features} classes must not be sharded by tensor parallelism to compute its "
                "logits in chunks. Leave it out of the plan."
            )
        device, amp = input.device.type, None
        if torch.is_autocast_enabled(device) and input.dtype is not torch.float64:
            amp = torch.get_autocast_dtype(device)
        inputs = {"hidden": input, "weight": self.weight, "bias": self.bias, "softcap": self.softcap}
        return {"head": self, "amp": amp, "dtype": amp or input.dtype, **inputs}

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"{super().extra_repr()}, chunk_size={self.chunk_size}, z_loss={self.z_loss}, softcap={self.softcap}"


class _Logits(Tensor):
    """The logits of a head, which are computed when they are used; ``amp`` is the dtype of autocast in the head."""

    head: ChunkedHead
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    amp: torch.dtype | None
    version: int

    @staticmethod
    def __new__(cls: Any, dtype: torch.dtype, hidden: Tensor, weight: Tensor, **fields: Any) -> _Logits:
        self: _Logits = Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, (*hidden.shape[:-1], len(weight)), dtype=dtype, device=hidden.device
        )
        vars(self).update({"version": weight._version, "hidden": hidden, "weight": weight, **fields})  # noqa: SLF001
        return self

    def replaced(self, **changes: Any) -> _Logits:
        """Return the logits of other inputs."""
        return _create(**{"dtype": self.dtype, **vars(self), **changes})

    def as_called(self) -> torch.autocast:
        """Return the context of autocast in which the head was called.

        Raises:
            RuntimeError: The weight is not what it was then.
        """
        if self.weight._version != self.version or not self.weight.untyped_storage().size():  # noqa: SLF001
            raise RuntimeError(
                "The logits of a ChunkedHead must be used before a step changes its weight or FSDP2 releases it. With "
                "FSDP2, compute the loss in the model's forward or set reshard_after_forward=False, and use metrics "
                "for evaluations only: HuggingFaceModel(metrics=[], eval_metrics=...), or of a ComposerClassifier "
                "train_metrics=[]."
            )
        return torch.autocast(self.device.type, self.amp, enabled=self.amp is not None)

    def compute(self, reason: str) -> Tensor:
        """Return all logits."""
        if torch.is_grad_enabled() and self.requires_grad:
            warnings.warn(
                f"All logits of a ChunkedHead are computed for {reason!r}, which needs the memory of a usual head, and "
                "adds no z-loss. Compute the loss by torch.nn.functional.cross_entropy from rows (N, C) of logits.",
                stacklevel=4,
            )
        with self.as_called():
            logits = linear(self.hidden, self.weight, self.bias)
        return (logits if self.softcap is None else softcap(logits, self.softcap)).to(self.dtype)

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation without the logits if possible; otherwise compute them."""
        name = func.__name__
        kwargs = {} if kwargs is None else {**kwargs}
        if not args and "input" in kwargs:  # as in torch.mul(input=logits, other=2.0)
            args = (kwargs.pop("input"),)
        if name in _METADATA or (name == "__get__" and func.__self__.__name__ not in _VALUES):
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                return func(*args, **kwargs)
        if name in _OPERATIONS and isinstance(args[0], _Logits):
            result = _OPERATIONS[name](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name == "register_hook" and getattr(args[1], "__module__", "").startswith("torch.distributed"):
            return args[0].hidden.register_hook(args[1])  # FSDP2 waits for the beginning of the backward pass
        if isinstance(args[0], _Logits):
            _check_unchanged(name)
        args, kwargs = tree_map_only(_Logits, lambda one: one.compute(name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise an error: logits that are not stored cannot be read."""
        raise RuntimeError(f"The logits of a ChunkedHead are not stored, so {func} cannot read them.")


def _check_unchanged(name: str) -> None:
    """Raise a RuntimeError for an operation that changes logits in place."""
    if name in _CHANGES or (name.endswith("_") and not name.startswith("_")):
        raise RuntimeError(
            f"The logits of a ChunkedHead are not stored, so {name!r} cannot change them. Use an operation that "
            "returns new logits, or remove ChunkedCrossEntropy."
        )


class _Create(torch.autograd.Function):
    """Logits in the graph of what they are computed from, where DistributedDataParallel finds the used parameters."""

    @staticmethod
    def forward(ctx: Any, fields: Mapping[str, Any], *_: Tensor | None) -> _Logits:
        ctx.set_materialize_grads(False)
        return _Logits(**fields)

    @staticmethod
    def backward(*_: Any) -> tuple[None, ...]:
        return (None,) * 4


@_disable_dynamo
def _deferred(**fields: Any) -> _Logits:
    return _create(**fields)


def _create(**fields: Any) -> _Logits:
    logits: _Logits = _Create.apply(fields, fields["hidden"], fields["weight"], fields["bias"])
    return logits


class TracedLogits:
    """The logits of a head in a graph that is compiled, of which a tensor of a subclass would be a break.

    It has the operations of logits that are computed when they are used, and computes them for all others. Outside of
    the graph :meth:`to_tensor` returns a tensor.

    Args:
        fields: As of :class:`ChunkedHead`'s logits: ``head``, ``hidden``, ``weight``, ``bias``, ``softcap``, ``amp``
            and ``dtype``.
    """

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.head, self.hidden, self.weight, self.bias = (fields[name] for name in _TENSORS)
        self.softcap, self.dtype, self.device = fields["softcap"], fields["dtype"], fields["hidden"].device
        self.ndim, self.shape = self.hidden.ndim, torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    def to_tensor(self) -> Tensor:
        """Return a tensor of the same logits, which are not computed either."""
        return _deferred(**self.fields)

    def replaced(self, **changes: Any) -> TracedLogits:
        """Return the logits of other inputs."""
        return TracedLogits(**{**self.fields, **changes})

    def as_called(self) -> torch.autocast:
        """Return the context of autocast in which the head was called."""
        amp = self.fields["amp"]
        return torch.autocast(self.device.type, amp, enabled=amp is not None)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one dimension of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of logits."""
        return math.prod(self.shape)

    def compute(self, _: str = "") -> Tensor:
        """Return all logits."""
        with self.as_called():
            logits = linear(self.hidden, self.weight, self.bias)
        return (logits if self.softcap is None else softcap(logits, self.softcap)).to(self.dtype)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of tensors, without the logits if possible."""
        result = _OPERATIONS[name](self, *args, **kwargs) if name in _OPERATIONS else NotImplemented
        if result is not NotImplemented:
            return result
        _check_unchanged(name)
        return getattr(self.compute(), name)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return a method or an attribute of tensors."""
        value = getattr(Tensor, name)
        return partial(self.call, name) if callable(value) else getattr(self.compute(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function without the logits if possible; otherwise compute them."""
        name, kwargs = func.__name__, {**(kwargs or {})}
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        if isinstance(args[0], TracedLogits):
            if name in _OPERATIONS and (result := _OPERATIONS[name](*args, **kwargs)) is not NotImplemented:
                return result
            _check_unchanged(name)
        args, kwargs = tree_map_only(TracedLogits, TracedLogits.compute, (args, kwargs))
        return func(*args, **kwargs)


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: self.call(name, *others)


# Python looks up the methods of operators in the class.
for _name in (
    *("__getitem__", "__setitem__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__rtruediv__", "__pow__", "__neg__", "__len__", "__gt__", "__ge__", "__lt__", "__le__"),
):
    setattr(TracedLogits, _name, _operator(_name))
_TENSORS = ("head", "hidden", "weight", "bias")
_METADATA = frozenset(
    {"__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point"}
    | {"ndimension", "nelement", "numel", "size"}
)
_VALUES = frozenset({"H", "T", "data", "imag", "mH", "mT", "real"})
_CHANGES = frozenset({"__set__", "__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__", "register_hook"})


_INDICES = (int, slice, list, Tensor, EllipsisType, NoneType)


def _index(logits: _Logits, index: Any) -> Any:
    """Index all but the last dimension."""
    items = index if isinstance(index, tuple) else (index,)
    if not items or not all(isinstance(one, _INDICES) and not isinstance(one, _Logits) for one in items):
        return NotImplemented
    last = items[-1]
    keeps_last = isinstance(last, slice) and last == slice(None)
    if not keeps_last and last is not Ellipsis and Ellipsis in [one for one in items if not isinstance(one, Tensor)]:
        return NotImplemented
    used = sum(one.ndim if isinstance(one, Tensor) and one.dtype is torch.bool else one is not None for one in items)
    if not keeps_last and used - (last is Ellipsis) >= logits.ndim:
        return NotImplemented
    return logits.replaced(hidden=logits.hidden[index])


def _reshape(logits: _Logits, *shape: Any, **kwargs: Any) -> Any:
    """Reshape all but the last dimension."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if kwargs or not sizes or not all(isinstance(one, int) for one in sizes):
        return NotImplemented
    *sizes, last = sizes
    classes = logits.shape[-1]
    if last != classes and (last != -1 or math.prod(sizes) * classes != logits.numel()):
        return NotImplemented
    return logits.replaced(hidden=logits.hidden.reshape(*sizes, logits.hidden.shape[-1]))


def _flatten(logits: _Logits, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Flatten all but the last dimension."""
    if end_dim % logits.ndim == logits.ndim - 1:
        return NotImplemented
    return logits.replaced(hidden=logits.hidden.flatten(start_dim, end_dim))


def _to(logits: _Logits, dtype: Any, *args: Any, **kwargs: Any) -> Any:
    """Convert the dtype."""
    return logits.replaced(dtype=dtype) if isinstance(dtype, torch.dtype) and not (args or kwargs) else NotImplemented


def _scale(logits: _Logits, other: Any, **kwargs: Any) -> Any:
    """Multiply by a number."""
    if kwargs or not isinstance(other, (int, float)) or not other:
        return NotImplemented
    factor = other
    bias, cap = logits.bias, logits.softcap
    return logits.replaced(
        hidden=logits.hidden * factor,
        bias=None if bias is None else bias * factor,
        softcap=None if cap is None else abs(cap * factor),  # tanh is odd
    )


def _divide(logits: _Logits, other: Any, **kwargs: Any) -> Any:
    """Divide by a number."""
    return _scale(logits, 1 / other if isinstance(other, (int, float)) else other, **kwargs)


def _tanh(logits: _Logits) -> Any:
    """Limit to 1, which a later factor changes."""
    return logits.replaced(softcap=1.0) if logits.softcap is None else NotImplemented


def _cross_entropy(
    input: _Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute the loss from the inputs of the head."""
    if input.ndim != 2 or weight is not None or size_average is not None or reduce is not None:
        return NotImplemented
    is_mean_of_all = reduction == "mean" and target.is_floating_point()
    with input.as_called():
        loss = linear_cross_entropy(
            input.hidden,
            input.weight,
            target,
            input.bias,
            chunk_size=input.head.chunk_size,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=input.head.z_loss if torch.is_grad_enabled() else 0.0,
            softcap=input.softcap,
            reduction="sum" if is_mean_of_all else reduction,
        )
    return loss / len(target) if is_mean_of_all else loss


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "__getitem__": _index,
    "__mul__": _scale,
    "__rmul__": _scale,
    "__truediv__": _divide,
    "clone": lambda logits: logits.replaced(),
    "contiguous": lambda logits: logits,
    "cross_entropy": _cross_entropy,
    "detach": lambda logits: logits.replaced(
        **{name: value.detach() if isinstance(value, Tensor) else value for name, value in vars(logits).items()}
    ),
    "div": _divide,
    "flatten": _flatten,
    "double": lambda logits: logits.replaced(dtype=torch.float64),
    "float": lambda logits: logits.replaced(dtype=torch.float32),
    "mul": _scale,
    "reshape": _reshape,
    "tanh": _tanh,
    "to": _to,
    "view": _reshape,
}
"""Operations on logits that do not need them; they return ``NotImplemented`` for arguments with which they do."""

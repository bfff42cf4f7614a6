"""How an exported model is called: with the items of a batch that its forward pass uses, and for plain outputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from composer.core import batch_set

if TYPE_CHECKING:
    from collections.abc import Sequence

    from composer.core import Batch

__all__ = ["ExportedCall", "make_call", "tensors_in"]


@attrs.frozen(eq=False)
class ExportedCall:
    """A model, and the inputs that it is exported with.

    Args:
        module: Called with the inputs; returns tensors, or tuples, lists and dictionaries of tensors.
        inputs: A sample of them by name; each is a tensor or holds tensors. All are on the CPU.
        by_name: Whether they are given by name; else by their place.
        num_samples: How many samples the inputs hold; None if they hold no batch of samples.
    """

    module: nn.Module
    inputs: Mapping[str, Any]
    by_name: bool
    num_samples: int | None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what to call the module with, by place and by name."""
        return ((), dict(self.inputs)) if self.by_name else (tuple(self.inputs.values()), {})

    def outputs(self) -> Any:
        """Return what the module makes of the inputs."""
        places, names = self.arguments()
        return self.module(*places, **names)

    def with_samples(self, num_samples: int) -> ExportedCall:
        """Return the same call with another number of samples, at least 1: the first ones again, or fewer."""

        def resized(tensor: Tensor) -> Tensor:
            rows = torch.arange(num_samples) % tensor.shape[0]
            return tensor[rows] if self.is_batched(tensor) else tensor

        inputs = {name: _mapped(resized, value) for name, value in self.inputs.items()}
        return attrs.evolve(self, inputs=inputs, num_samples=num_samples)

    def is_batched(self, tensor: Tensor) -> bool:
        """Return whether a tensor's first dimension counts the samples."""
        return tensor.ndim > 0 and tensor.shape[0] == self.num_samples


def make_call(
    model: nn.Module,
    batch: Batch,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> ExportedCall:
    """Return how a model is to be called once it is exported; it runs the model once to see what it uses.

    Items of the batch that the forward pass never looks at, such as a classifier's targets, are left out, and so are
    values among the outputs that are no tensors. A mapping's items are given by name, a sequence's by their place.

    Args:
        model: On the CPU and in evaluation mode, with ``forward(batch)``.
        batch: A sample: a tensor, or a sequence or mapping of tensors.
        input_names: What the inputs are called, instead of by their keys.
        output_names: What the outputs are called; they are then returned in a dictionary.

    Raises:
        TypeError: The batch or the outputs are of another kind.
        ValueError: There are other numbers of names than of inputs or outputs, or a name is none.

    Example:
        >>> class First(nn.Module):
        ...     def forward(self, batch):
        ...         return 2 * batch[0]
        >>> call = make_call(First(), (torch.ones(3), torch.zeros(3)))
        >>> list(call.inputs), call.module(torch.ones(2))
        (['input'], tensor([2., 2.]))
    """
    # One tensor may stand at two places, as labels that are the input: each place shall have an object of its own.
    items = {key: _mapped(Tensor.detach, value) for key, value in _items(batch).items()}
    batch = items[0] if isinstance(batch, Tensor) else _with_items(batch, items)
    with torch.no_grad(), _Watch() as watch:
        outputs = model(batch)
    watch.seen.update(id(one) for one in tensors_in(outputs))  # what is handed through untouched is used, too
    used = {key: value for key, value in items.items() if any(id(one) in watch.seen for one in tensors_in(value))}
    if not used:
        raise ValueError(f"The forward pass of {type(model).__name__} uses no tensor of sample_input.")
    names = _names_of_inputs(list(used), input_names, type(model).__name__)
    emptied = {key: None if next(tensors_in(value), None) is not None else value for key, value in items.items()}
    template = None if isinstance(batch, Tensor) else _with_items(batch, emptied)
    count = len(list(tensors_in(_plain(outputs))))
    if output_names is not None and len(output_names) != count:
        raise ValueError(f"output_names must have one name for each of the {count} outputs, got {list(output_names)}.")
    if output_names is not None and len(set(output_names)) != count:
        raise ValueError(f"output_names must differ from each other, got {list(output_names)}.")
    inputs = dict(zip(names, used.values(), strict=True))
    first = next((one for one in tensors_in(inputs) if one.ndim), None)
    return ExportedCall(
        _call_class(names)(model, template, tuple(used), output_names),
        inputs,
        by_name=isinstance(batch, Mapping),
        num_samples=None if first is None or not len(first) else len(first),
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return the tensors of nested sequences and mappings, in order.

    Example:
        >>> len(list(tensors_in({"a": torch.ones(1), "b": [torch.ones(1), 3]})))
        2
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


class _Call(nn.Module):
    """A model that is called with items of a batch instead of the batch.

    Args:
        model: With ``forward(batch)``.
        template: The batch without tensors; None if the batch is a tensor.
        keys: Where the inputs belong in it.
        output_names: What the outputs are called.
    """

    input_names: tuple[str, ...] = ()

    def __init__(
        self, model: nn.Module, template: Batch, keys: tuple[Any, ...], output_names: Sequence[str] | None
    ) -> None:
        super().__init__()
        self.model = model
        self._template, self._keys, self._output_names = template, keys, output_names

    def forward(self, *places: Any, **names: Any) -> Any:
        """Return the model's outputs, as plain tensors, tuples, lists and dictionaries."""
        values = places if places else tuple(names[name] for name in self.input_names)
        given = dict(zip(self._keys, values, strict=True))
        batch = values[0] if self._template is None else _with_items(self._template, given)
        outputs = _plain(self.model(batch))
        if self._output_names is None:
            return outputs
        return dict(zip(self._output_names, tensors_in(outputs), strict=True))


def _call_class(names: Sequence[str]) -> type[_Call]:
    """Return a class whose ``forward`` says its parameters' names: torch.export takes the inputs' names from there."""

    def forward(self: _Call, *places: Any, **names: Any) -> Any:
        return _Call.forward(self, *places, **names)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in ("self", *names)])
    forward.__signature__ = signature  # type: ignore[attr-defined]  # inspect reads it, typeshed does not know it
    return type("ExportedModel", (_Call,), {"forward": forward, "input_names": tuple(names)})


class _Watch(TorchFunctionMode):
    """Notes which tensors anything is done with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.seen.update(id(one) for one in tensors_in([args, kwargs]))
        return func(*args, **kwargs)


def _items(batch: Batch) -> Mapping[Any, Any]:
    if isinstance(batch, Tensor):
        return {0: batch}
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, (list, tuple)):
        return dict(enumerate(batch))
    raise TypeError(
        "sample_input must be a batch as the model's forward takes it: a tensor, or a sequence or mapping of tensors, "
        f"got {type(batch).__name__}."
    )


def _with_items(batch: Batch, items: Mapping[Any, Any]) -> Batch:
    for key, value in items.items():
        batch = batch_set(batch, key, value)
    return batch


def _names_of_inputs(keys: Sequence[Any], given: Sequence[str] | None, model: str) -> list[str]:
    if given is None:
        numbered = ["input"] if len(keys) == 1 else [f"input_{place}" for place in range(len(keys))]
        return [
            key if isinstance(key, str) and _is_name(key) else name for key, name in zip(keys, numbered, strict=True)
        ]
    if len(given) != len(keys) or len(set(given)) != len(keys) or not all(map(_is_name, given)):
        raise ValueError(
            f"input_names must have a name, as a Python variable has it, for each of the {len(keys)} inputs that "
            f"{model} uses ({', '.join(map(repr, keys))}), got {list(given)}."
        )
    return list(given)


def _is_name(name: str) -> bool:
    return name.isidentifier() and name != "self"


def _mapped(function: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _mapped(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_mapped(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _plain(outputs: Any) -> Any:
    """Return outputs that can be read where nothing but torch is installed."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return {name: _plain(value) for name, value in outputs.items() if next(tensors_in(value), None) is not None}
    if isinstance(outputs, (list, tuple)):
        items = [_plain(value) for value in outputs if next(tensors_in(value), None) is not None]
        return tuple(items) if isinstance(outputs, tuple) else items
    raise TypeError(
        "forward must return a tensor, or a sequence or mapping of tensors, to be exported, "
        f"got {type(outputs).__name__}."
    )

"""The layers of a model, what surgery replaced, and the memory of one batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from composer.core import DataSpec, Event, Precision, State, get_precision_context
from composer.core.data_spec import describe_batch, move_batch, note_batch
from composer.core.optimizers import unwrapped
from composer.functional.checks import check_whole
from composer.functional.dtensors import is_sharded
from composer.functional.nested import leaves
from composer.loggers.values import aligned, html_table
from composer.trainer.evaluation.evaluate import first_batch
from composer.trainer.gradients import split_microbatches
from composer.trainer.optimization import Optimization
from composer.trainer.tools.find_lr import train_step
from composer.trainer.tools.trial import trial

if TYPE_CHECKING:
    from composer.trainer.trainer import Trainer

_LONGEST = 40
"""The number of characters of a shape in the table."""


@attrs.frozen
class Layer:
    """A module of a model.

    Args:
        path: Its path; empty for the model itself.
        kind: Its class.
        input, output: The shapes of its first call, as strings; empty if it was not called.
        num_parameters: The number of its parameters, with those of its children; shared ones are counted once.
        replaced: The algorithm that put it there, and the former class; empty if it is the user's own.
    """

    path: str
    kind: str
    input: str
    output: str
    num_parameters: int
    replaced: str = ""


@attrs.frozen(repr=False)
class ModelSummary:
    """The layers of a model and the memory of one batch. It prints as a table.

    Args:
        layers: The modules, parents before children.
        batch: The shapes of the batch, as a string.
        num_parameters, num_trainable: The number of parameters, and of those that are trained.
        memory: The bytes of ``parameters``, ``gradients``, ``optimizer state`` (0 before the first step), ``buffers``,
            ``batch``, and ``activations``: what is stored for the backward pass of the batch, or of a microbatch.

    Example:
        >>> import torch
        >>> from composer.models import ComposerClassifier
        >>> from composer.trainer import Trainer
        >>> model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = Trainer(model=model, optimizers=optimizer, device="cpu", progress_bar=False)
        >>> summary = trainer.summary((torch.rand(8, 4), torch.zeros(8, dtype=torch.long)))
        >>> [(layer.path, layer.output) for layer in summary.layers]
        [('', 'float32[8, 2]'), ('module', 'float32[8, 2]')]
        >>> summary.memory["parameters"]
        40
    """

    layers: tuple[Layer, ...]
    batch: str
    num_parameters: int
    num_trainable: int
    memory: Mapping[str, int]

    def __repr__(self) -> str:
        """Return the tables."""
        return "\n".join([*aligned(self._rows()), "", *self._totals()])

    def _repr_html_(self) -> str:  # the method that notebooks call
        head, *rows = self._rows()
        shown = [(name.replace("  ", "\N{NO-BREAK SPACE}" * 4), *cells) for name, *cells in rows]
        return html_table(shown, head, "\n".join(self._totals()), left=4)

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("LAYER", "CLASS", "INPUT", "OUTPUT", "PARAMETERS", "REPLACED BY")]
        for layer in self.layers:
            depth, name = layer.path.count(".") + bool(layer.path), layer.path.rpartition(".")[2] or "(model)"
            count = f"{layer.num_parameters:,}" if layer.num_parameters else ""
            shapes = (_cut(layer.input), _cut(layer.output))
            rows.append((f"{'  ' * depth}{name}", layer.kind, *shapes, count, layer.replaced))
        return rows if any(layer.replaced for layer in self.layers) else [(*row[:-1], "") for row in rows]

    def _totals(self) -> list[str]:
        memory = ", ".join(f"{name} {_size(number)}" for name, number in self.memory.items() if number)
        return [
            f"parameters: {self.num_parameters:,}, of which {self.num_trainable:,} are trained",
            f"batch: {self.batch}",
            f"memory: {memory}; in all {_size(sum(self.memory.values()))}",
        ]


def summarize(state: State, spec: DataSpec | None, sample_input: Any, *, max_depth: int) -> ModelSummary:
    """Return the summary of a state's model, which is left as it was.

    Args:
        state: The run.
        spec: The data whose first batch is computed; None if ``sample_input`` is given.
        sample_input: The batch; None for the first one of the data.
        max_depth: How many levels of modules are listed below the model.

    Raises:
        ValueError: There is no batch, or the model is sharded.
    """
    model = state.model
    if is_sharded(model):
        raise ValueError(
            "A model that is sharded over processes cannot be summarized, as each process has only a part of it. Call "
            "summary() before fit(), or without parallelism_config."
        )
    modules = {path: one for path, one in model.named_modules() if (path.count(".") + bool(path)) <= max_depth}
    shapes: dict[int, tuple[str, str]] = {}
    replacements = [
        (state.component_key(one), replaced) for one in state.algorithms for replaced in one.surgery_report or ()
    ]
    origins = {path: f"{name} (was {one.old})" for name, one in replacements for path in one.paths}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = [*args, *kwargs.values()]
        shapes.setdefault(id(module), (describe_batch(given[0]) if given else "", describe_batch(output)))

    with contextlib.ExitStack() as stack:
        stack.enter_context(trial(state, None if spec is None else spec.dataloader, steps=False))
        batch = _batch(state, spec, sample_input)
        for module in modules.values():
            if module is not model:
                stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        outputs, num_stored = _compute(state, batch)
        shapes[id(model)] = describe_batch(batch), describe_batch(outputs)
    return ModelSummary(
        tuple(
            Layer(path, type(one).__name__, *shapes.get(id(one), ("", "")), _count(one), origins.get(path, ""))
            for path, one in modules.items()
            if id(one) in shapes or _count(one)  # metrics are modules, too
        ),
        describe_batch(batch),
        _count(model),
        sum(one.numel() for one in model.parameters() if one.requires_grad),
        _memory(state, _bytes(_tensors(batch)), num_stored),
    )


def estimate_memory(
    trainer: Trainer,
    batch_size: int | None = None,
    precision: str | Precision | None = None,
    *,
    sample_input: Any = None,
) -> dict[str, int]:
    """Return the bytes that a step needs: of weights, gradients, optimizer state, buffers, batch and activations.

    It computes the losses of two batches, and trains one step, after which everything is restored bit for bit. The
    total is that of all parts at once: what an operation needs while it runs comes on top.

    Args:
        trainer: The trainer, before ``fit``.
        batch_size: The samples of a microbatch; those of the batch if None. Activations of more samples than the batch
            has are extrapolated linearly.
        precision: The precision; the trainer's if None.
        sample_input: A batch as the model's ``forward`` takes it; the first microbatch to train on if None.

    Returns:
        The bytes by the names of ``trainer.summary().memory``, and their sum, ``"total"``.

    Raises:
        TypeError: ``trainer`` is something else, such as a model.
        ValueError: A value is out of range, there is no batch, or the model is sharded.

    Example:
        >>> from composer import Trainer
        >>> from composer.models import ComposerClassifier
        >>> model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> trainer = Trainer(model=model, optimizers=optimizer, device="cpu", progress_bar=False)
        >>> memory = estimate_memory(trainer, 64, sample_input=(torch.rand(8, 4), torch.zeros(8, dtype=torch.long)))
        >>> memory["parameters"], memory["optimizer state"], memory["batch"]
        (40, 40, 1536)
    """
    if not hasattr(trainer, "state"):
        raise TypeError(f"trainer must be a Trainer, which has the model and its data, got {type(trainer).__name__}.")
    state, spec = trainer.state, trainer._data.spec  # noqa: SLF001  (the data of the trainer)
    if batch_size is not None:
        check_whole("batch_size", batch_size, 1, "It counts samples.")
    if is_sharded(state.model):
        raise ValueError("estimate_memory must be called before fit(), which shards the model over processes.")
    former = state.precision
    with trial(state, None if spec is None else spec.dataloader, steps=True):
        state.precision = former if precision is None else Precision(precision)
        try:
            batch = _batch(state, spec, sample_input)
            spec = spec or DataSpec([batch])
            samples = int(spec.get_num_samples_in_batch(batch))
            wanted = batch_size or samples
            # Activations grow by the same number of bytes for each sample.
            few, more = min(samples, wanted), min(samples, wanted, max(2, min(samples, wanted) // 2))
            first, second = (split_microbatches(batch, spec, size)[0][0] for size in (few, more))
            stored = [_compute(state, one)[1] for one in (first, second)]
            each = (stored[0] - stored[1]) / (few - more) if few > more else stored[0] / few
            state.batch = second
            train_step(state, spec, Optimization(state, torch.zeros((), dtype=torch.int64, device=state.device)))
            of_batch = _bytes(_tensors(first)) * wanted // few
            parts = _memory(state, of_batch, round(stored[0] + each * (wanted - few)))
        finally:
            state.precision = former
    return {**parts, "total": sum(parts.values())}


def _batch(state: State, spec: DataSpec | None, sample_input: Any) -> Any:
    """Return the first microbatch of the data, or the sample input, on the state's device."""
    if sample_input is not None:
        return move_batch(sample_input, state.device)
    if spec is None or isinstance(spec.dataloader, Iterator):
        raise ValueError(
            "There is no batch to compute: give sample_input, or a train_dataloader that can be iterated over again."
        )
    batch = first_batch(state, spec, "train_dataloader")
    return split_microbatches(batch, spec, state.device_train_microbatch_size)[0][0]


def _compute(state: State, batch: Any) -> tuple[Any, int]:
    """Return the outputs for a batch, and the bytes that are stored for the backward pass of its loss.

    The method is called and not the module, as a compiled module would not call the hooks.
    """
    own = {_storage(tensor) for tensor in (*state.model.parameters(), *state.model.buffers(), *_tensors(batch))}
    stored: dict[int, int] = {}

    def store(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in own:
            stored[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(store, lambda tensor: tensor), get_precision_context(state.precision, state.device.type):
        try:
            outputs = state.model.forward(batch)
            loss = state.model.loss(outputs, batch)
        except Exception as error:
            note_batch(error, Event.BEFORE_FORWARD, state.model, ".forward", batch)
            raise
        del loss  # until here its graph keeps the tensors, so that each has a storage of its own
    return outputs, sum(stored.values())


def _memory(state: State, of_batch: int, of_activations: int) -> dict[str, int]:
    """Return the bytes of each part; ``ModelSummary`` describes them."""
    model = state.model
    states = [tensor for one in state.optimizers for tensor in _tensors([*unwrapped(one).state.values()])]
    return {
        "parameters": _bytes(model.parameters()),
        "gradients": _bytes(one for one in model.parameters() if one.requires_grad),
        "optimizer state": _bytes(states),
        "buffers": _bytes(model.buffers()),
        "batch": of_batch,
        "activations": of_activations,
    }


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(nested) if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."

"""Export of models for inference: write a file that needs neither this library nor the model's code, and verify it."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from composer.checkpoint.remote import file_system
from composer.core import Batch, batch_set
from composer.core.checks import to_strings
from composer.core.data.batches import move_batch
from composer.core.saving.randomness import preserve_rng_state
from composer.functional.checks import check_choice
from composer.functional.dtensors import is_sharded
from composer.loggers.products import require_product
from composer.models import HuggingFaceModel

Transform: TypeAlias = Callable[[nn.Module], nn.Module | None]
"""Changes a model before it is exported: returns the model to export, or None if it changed its argument in place."""

_SUFFIXES = {"torchexport": ".pt2", "onnx": ".onnx"}


class ExportError(RuntimeError):
    """A model cannot be exported, or the exported model computes different outputs.

    Example:
        >>> model = nn.Flatten(0)  # returns other outputs than one for each sample
        >>> raise ExportError("The exported model fails on 5 samples.")
        Traceback (most recent call last):
        composer.export.inference.ExportError: The exported model fails on 5 samples.
    """


def export_for_inference(
    model: nn.Module,
    save_format: str,
    save_path: str | Path,
    *,
    sample_input: Batch,
    transforms: Transform | Sequence[Transform] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Export a model, with all changes that algorithms have made to it, to a file that does not need this library.

    A copy of the model is exported, on the CPU and in evaluation mode. The model, its mode, device and hooks, and the
    global generators do not change. The file is read back, and its outputs are compared with those of the copy for the
    sample and for a batch with one sample more. Only if they agree is the file moved to ``save_path``.

    The exported function is ``model(batch)``. The exported model takes as separate inputs those items of the batch that
    ``forward`` uses: a tensor or the items of a sequence by position, the items of a mapping by name. For example, a
    :class:`~composer.models.ComposerClassifier` is exported with images as its only input, because its ``forward`` does
    not use the targets. Items that only the loss needs can be left out of the sample: ``{"input_ids": …}``.

    Args:
        model: With ``forward(batch)``.
        save_format: ``"torchexport"``, for :func:`torch.export.load`; or ``"onnx"``, which requires
            ``pip install "composer-trainer[onnx]"``.
        save_path: The file. An existing file is replaced, missing folders are created. It may be a URL supported by
            fsspec, such as ``s3://bucket/model.pt2``.
        sample_input: A batch as the model takes it. Only shapes and dtypes matter.
        transforms: Functions that change the copy before it is exported, such as quantization: ``f(model)`` returns the
            model to export, or None if it changed its argument in place.
        input_names: Names of the inputs; by default the keys of a mapping, or ``input`` and ``input_0``, ….
        output_names: Names of the outputs, which the exported model then returns in a dictionary. By default the keys
            of the mapping that the model returns; in ONNX, ``_output`` is appended to those that are names of inputs.
        dynamic_batch: Whether the exported model takes any number of samples, or only as many as the sample has.
        rtol: Relative tolerance of the comparison; requires ``atol``.
        atol: Absolute tolerance. By default both are those of :func:`torch.testing.assert_close` for ``"torchexport"``,
            and 1e-3 and 1e-4 for ``"onnx"``.

    Raises:
        TypeError: The sample or the outputs are neither tensors nor sequences or mappings of tensors.
        ValueError: The format is unknown, the model is sharded, or the number of names is wrong or a name is not
            unique.
        ModuleNotFoundError: A package that the format requires is not installed.
        ExportError: The model cannot be exported, or the exported model computes different outputs. No file is written.

    Example:
        >>> import tempfile
        >>> from composer.models import ComposerClassifier
        >>> model = ComposerClassifier(nn.Linear(4, 2), num_classes=2)
        >>> batch = torch.rand(8, 4), torch.zeros(8, dtype=torch.long)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_for_inference(model, "torchexport", f"{folder}/model.pt2", sample_input=batch)
        ...     exported = torch.export.load(f"{folder}/model.pt2").module()
        >>> exported(torch.rand(3, 4)).shape
        torch.Size([3, 2])
    """
    _check_arguments(model, save_format, rtol, atol)
    input_names = None if input_names is None else to_strings("input_names", input_names)
    output_names = None if output_names is None else to_strings("output_names", output_names)
    with preserve_rng_state(), torch.no_grad():
        prepared = _copy_on_cpu(model)
        for transform in [transforms] if callable(transforms) else transforms or []:
            changed = transform(prepared)
            prepared = prepared if changed is None else changed
        prepared.eval().requires_grad_(requires_grad=False)
        call = _make_call(prepared, move_batch(sample_input, torch.device("cpu")), input_names, output_names)
        if dynamic_batch and call.num_samples == 1:
            call = call.with_samples(2)  # torch.export treats a size of 1 as static
        program = _exported(call, dynamic_batch=dynamic_batch)
        with _atomic_file(str(save_path), save_format) as path:
            run = _write(program, call, path, save_format, output_names)
            _compare(run, call, save_format, rtol, atol)
            if dynamic_batch and call.num_samples is not None:
                _compare(run, call.with_samples(call.num_samples + 1), save_format, rtol, atol)


def without_labels(model: nn.Module, batch: Any) -> Any:
    """Return a batch of a model of Transformers without its labels, which only the loss needs.

    An encoder and decoder computes the inputs of the decoder from them: its batch is returned as it is.
    """
    if isinstance(model, HuggingFaceModel) and isinstance(batch, Mapping) and not model.config.is_encoder_decoder:
        return {name: value for name, value in batch.items() if name != "labels"}
    return batch


def _check_arguments(model: nn.Module, save_format: str, rtol: float | None, atol: float | None) -> None:
    check_choice("save_format", save_format, *_SUFFIXES)
    if (rtol is None) != (atol is None):
        raise ValueError(f"rtol and atol must be given together, got rtol={rtol} and atol={atol}.")
    if save_format == "onnx":
        require_product("onnx", "onnx")
        require_product("onnxscript", "onnx")
    check_not_sharded(model)


def check_not_sharded(model: nn.Module) -> None:
    """Raise a ValueError if a model is split over processes."""
    if is_sharded(model):
        raise ValueError(
            "A model that is sharded over processes cannot be exported. Save a checkpoint (save_folder), and export in "
            "a second program, of one process: Trainer(model=model, load_path=..., load_weights_only=True)"
            ".export_for_inference(...). SavePretrained saves sharded models of Transformers as they are."
        )


def _copy_on_cpu(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode, without a second copy of weights on another device."""
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    model = getattr(model, "_orig_mod", model)  # of torch.compile(model)
    copies: dict[int, Any] = {}
    for weight in [*model.parameters(), *model.buffers()]:
        if type(weight) in {nn.Parameter, Tensor} and not weight.is_cpu:
            tensor = weight.detach().to("cpu", copy=True)
            is_parameter = isinstance(weight, nn.Parameter)
            copies[id(weight)] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
    return copy.deepcopy(model, copies).to("cpu").eval()


class _InferenceModel(nn.Module):
    """A model that takes the used items of a batch as separate inputs, and returns plain containers of tensors.

    Args:
        model: With ``forward(batch)``.
        template: The batch without its tensors; None if the batch is a tensor.
        keys: Where the inputs belong in the batch.
        output_names: Names of the outputs.
    """

    def __init__(
        self, model: nn.Module, template: Batch, keys: Sequence[Any], output_names: Sequence[str] | None
    ) -> None:
        super().__init__()
        self.model = model
        self._template, self._keys, self._output_names = template, keys, output_names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = args or tuple(kwargs.values())
        is_tensor = self._template is None
        batch = values[0] if is_tensor else _with_items(self._template, dict(zip(self._keys, values, strict=True)))
        outputs = _outputs_of(self.model(batch))
        if self._output_names is None:
            return outputs
        return dict(zip(self._output_names, _tensors_in(outputs), strict=True))


def _model_class(input_names: Sequence[str]) -> type[_InferenceModel]:
    """Return a class whose ``forward`` has the names as parameters: torch.export reads the signature."""

    def forward(self: _InferenceModel, *args: Any, **kwargs: Any) -> Any:
        return _InferenceModel.forward(self, *args, **kwargs)

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *input_names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which inspect reads
    return type("InferenceModel", (_InferenceModel,), {"forward": forward})


@attrs.frozen(eq=False)
class _Call:
    """A model and the inputs that it is exported with.

    Args:
        module: Takes the inputs.
        inputs: The inputs by name, all on the CPU; each is a tensor or a nested container of tensors.
        by_name: Whether the inputs are passed by name, or by position.
        num_samples: The number of samples; None if the inputs have no batch dimension.
    """

    module: nn.Module
    inputs: dict[str, Any]
    by_name: bool
    num_samples: int | None

    def run(self, module: Any) -> Any:
        return module(**self.inputs) if self.by_name else module(*self.inputs.values())

    def with_samples(self, num_samples: int) -> _Call:
        """Return the call with at least 1 sample: the first samples, repeated where there are more."""

        def resized(tensor: Tensor) -> Tensor:
            return tensor[torch.arange(num_samples) % len(tensor)] if self.is_batched(tensor) else tensor

        return attrs.evolve(self, inputs=tree_map_only(Tensor, resized, self.inputs), num_samples=num_samples)

    def is_batched(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == self.num_samples


class _RecordUse(TorchFunctionMode):
    """Records the ids of the tensors that are passed to torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.used.update(map(id, tree_leaves((args, kwargs))))
        return func(*args, **kwargs)


def _make_call(
    model: nn.Module, batch: Batch, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> _Call:
    """Run the model once to find the items of the batch that it uses, and return how the exported model is called."""
    items = {0: batch} if isinstance(batch, Tensor) else batch
    if not isinstance(items, (Mapping, list, tuple)):
        raise TypeError(
            "sample_input must be a batch as the model's forward takes it: a tensor, or a sequence or mapping of "
            f"tensors, got {type(batch).__name__}."
        )
    items = _to_builtin(dict(items if isinstance(items, Mapping) else enumerate(items)))
    items = tree_map_only(Tensor, Tensor.detach, items)  # a tensor at two places becomes two objects
    template = None
    if not isinstance(batch, Tensor):
        template = _with_items(batch, {key: None if _tensors_in(value) else value for key, value in items.items()})
    with torch.no_grad(), _RecordUse() as record:
        outputs = _outputs_of(model(items[0] if template is None else _with_items(batch, items)))
    record.used.update(map(id, _tensors_in(outputs)))  # tensors that are returned unchanged
    used = {key: value for key, value in items.items() if record.used.intersection(map(id, _tensors_in(value)))}
    if not used:
        raise ValueError(f"The forward pass of {type(model).__name__} uses no tensor of sample_input.")
    num_outputs = len(_tensors_in(outputs))
    if output_names is not None and not len(set(output_names)) == len(output_names) == num_outputs:
        raise ValueError(
            f"output_names must have one unique name for each of the {num_outputs} outputs, got {list(output_names)}."
        )
    names = _names_of_inputs(list(used), input_names, type(model).__name__)
    inputs = dict(zip(names, used.values(), strict=True))
    first = next((tensor for tensor in _tensors_in(inputs) if tensor.ndim), None)
    return _Call(
        _model_class(names)(model, template, tuple(used), output_names),
        inputs,
        by_name=isinstance(batch, Mapping),
        num_samples=None if first is None or not len(first) else len(first),
    )


def _names_of_inputs(keys: Sequence[Any], names: Sequence[str] | None, model: str) -> list[str]:
    def is_name(key: object) -> bool:
        return isinstance(key, str) and key.isidentifier() and key != "self"

    if names is None:
        numbered = ["input"] if len(keys) == 1 else [f"input_{position}" for position in range(len(keys))]
        return [key if is_name(key) else name for key, name in zip(keys, numbered, strict=True)]
    if len(names) != len(keys) or len(set(names)) != len(keys) or not all(map(is_name, names)):
        raise ValueError(
            f"input_names must have one unique Python identifier for each of the {len(keys)} inputs that {model} uses "
            f"({', '.join(map(repr, keys))}), got {list(names)}."
        )
    return list(names)


def _with_items(batch: Batch, items: Mapping[Any, Any]) -> Batch:
    for key, value in items.items():
        batch = batch_set(batch, key, value)
    return batch


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _to_builtin(value: Any, *, only_tensors: bool = False) -> Any:
    """Return nested mappings and sequences as dictionaries, lists and tuples; ``only_tensors`` drops other items."""
    if isinstance(value, Mapping):
        plain = {key: _to_builtin(item, only_tensors=only_tensors) for key, item in value.items()}
        return {key: item for key, item in plain.items() if not only_tensors or _tensors_in(item)}
    if isinstance(value, (list, tuple)):
        items = [_to_builtin(item, only_tensors=only_tensors) for item in value]
        items = [item for item in items if not only_tensors or _tensors_in(item)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _outputs_of(outputs: Any) -> Any:
    """Return the tensors among a model's outputs in containers that need no other library than torch."""
    if not isinstance(outputs, (Tensor, Mapping, list, tuple)):
        raise TypeError(
            "forward must return a tensor, or a sequence or mapping of tensors, to be exported, "
            f"got {type(outputs).__name__}."
        )
    return _to_builtin(outputs, only_tensors=True)


def _exported(call: _Call, *, dynamic_batch: bool) -> torch.export.ExportedProgram:
    args, kwargs = ((), call.inputs) if call.by_name else (tuple(call.inputs.values()), {})
    shapes = None
    if dynamic_batch:
        batch = torch.export.Dim("batch", max=2**31 - 1)  # torch 2.7 excludes the largest int64 for Transformers
        shapes = tree_map(lambda value: {0: batch} if call.is_batched(value) else None, call.inputs)
    try:
        return torch.export.export(call.module, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        remedy = " If the number of samples may be fixed, pass dynamic_batch=False." if dynamic_batch else ""
        raise ExportError(
            f"torch.export cannot trace the model's forward pass: {type(error).__name__}: {error}{remedy}"
        ) from error


def _write(
    program: torch.export.ExportedProgram, call: _Call, path: Path, save_format: str, output_names: Sequence[str] | None
) -> Callable[[_Call], list[Tensor]]:
    """Write the file, and return a function that runs it."""
    if save_format == "torchexport":
        torch.export.save(program, path)
        module = torch.export.load(path).module()
        return lambda call: _tensors_in(call.run(module))
    outputs = call.run(call.module)
    if output_names is None and isinstance(outputs, dict):
        output_names = _names_besides(call.inputs, list(outputs))
    both = sorted(set(output_names or ()) & call.inputs.keys())
    if both:
        raise ValueError(f"output_names must not be names of inputs in ONNX, got {both} for both. Choose others.")
    is_flat = all(isinstance(value, Tensor) for value in call.inputs.values())
    input_names = list(call.inputs) if is_flat else None
    written = torch.onnx.export(program, dynamo=True, input_names=input_names, output_names=output_names, verbose=False)
    assert written is not None
    written.save(path, external_data=False)
    names = [value.name for value in written.model.graph.inputs]
    if importlib.util.find_spec("onnxruntime") is not None:
        session = importlib.import_module("onnxruntime").InferenceSession(str(path))
    else:
        session = importlib.import_module("onnx.reference").ReferenceEvaluator(str(path))

    def run(call: _Call) -> list[Tensor]:
        arrays = [tensor.numpy() for tensor in _tensors_in(call.inputs)]
        return [torch.as_tensor(array) for array in session.run(None, dict(zip(names, arrays, strict=True)))]

    return run


def _names_besides(inputs: Collection[str], outputs: list[str]) -> list[str]:
    """Return names of outputs that differ from those of inputs, because an ONNX name identifies one value."""
    names: list[str] = []
    for output in outputs:
        name = output
        while name in inputs or (name != output and name in outputs) or name in names:
            name += "_output"
        names.append(name)
    return names


def _compare(
    run: Callable[[_Call], list[Tensor]], call: _Call, save_format: str, rtol: float | None, atol: float | None
) -> None:
    if rtol is None and save_format == "onnx":
        rtol, atol = 1e-3, 1e-4
    samples = "the sample" if call.num_samples is None else f"{call.num_samples} samples"
    try:
        computed = run(call)
    except Exception as error:
        raise ExportError(f"The exported model fails on {samples}: {type(error).__name__}: {error}") from error
    expected = _tensors_in(call.run(call.module))
    try:
        torch.testing.assert_close(computed, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        raise ExportError(
            f"The exported model computes something else than the original on {samples}: {error}"
        ) from error


@contextlib.contextmanager
def _atomic_file(target: str, save_format: str) -> Iterator[Path]:
    """Yield a path to write to, and move the written files to the target if the block ends without an error."""
    folder = None if "://" in target else Path(target).absolute().parent
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as temporary:
        # A large ONNX model refers to a second file by its name; torch requires its own suffix.
        name = Path(target).name if save_format == "onnx" else f"model{_SUFFIXES[save_format]}"
        path = Path(temporary) / name
        yield path
        parent = target.removesuffix(Path(target).name)
        for further in [file for file in Path(temporary).iterdir() if file != path]:
            _put(further, parent + further.name)
        _put(path, target)


def _put(path: Path, target: str) -> None:
    if "://" not in target:
        path.replace(target)
        return
    system, place = file_system(target)
    system.makedirs(place.rpartition("/")[0], exist_ok=True)
    system.put_file(str(path), place)

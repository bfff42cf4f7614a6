"""Models for use where nothing of this library is installed: written to a file, read back and compared."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import itertools
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from composer.core.data_spec import move_batch
from composer.core.randomness import preserve_rng_state
from composer.loggers.products import require_product
from composer.trainer.exported_call import ExportedCall, make_call, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from composer.core import Batch

__all__ = ["ExportError", "Transform", "export_for_inference"]

Transform: TypeAlias = Callable[[nn.Module], nn.Module | None]
"""Changes a model before it is exported: returns the one to go on with, or None if it changed the one it was given."""

_SUFFIXES = {"torchexport": ".pt2", "onnx": ".onnx"}


class ExportError(RuntimeError):
    """A model cannot be exported, or does not compute the same once it is."""


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
    """Write a model to a file that can be used without this library, with all that algorithms have changed in it.

    A copy of the model is exported, on the CPU and in evaluation mode; the model itself, its mode, device and hooks,
    and the random numbers are left as they are. The file is read back, and what it computes is compared with the
    copy: on the sample, and on one sample more. Only then it appears under its name.

    What is exported is ``model(batch)``. The exported model is called with those items of the batch that ``forward``
    uses, on their own: a tensor or the items of a sequence by their place, those of a mapping by name. So a
    :class:`~composer.models.ComposerClassifier` is called with images alone, as its ``forward`` leaves the targets be.
    What its loss needs can be left out of a sample where ``forward`` does without it: ``{"input_ids": …}``.

    Args:
        model: With ``forward(batch)``.
        save_format: ``"torchexport"``, to be read by :func:`torch.export.load`; or ``"onnx"``, which needs
            ``pip install "composer-trainer[onnx]"``.
        save_path: The file, which is replaced if it exists; missing folders are made. A URL that fsspec knows, such as
            ``s3://bucket/model.pt2``, will do as well.
        sample_input: A batch as the model takes it. The numbers in it do not matter, shapes and dtypes do.
        transforms: Functions that change the copy before it is exported, such as quantization: ``f(model)`` returns the
            model to go on with, or None if it changed the one it was given.
        input_names: What the inputs are called; by default by the keys of a mapping, or ``input`` and ``input_0``, ….
        output_names: What the outputs are called; the exported model then returns them in a dictionary. By default the
            keys of a mapping that the model returns; in ONNX one that is an input's name, too, gets ``_output`` behind.
        dynamic_batch: Whether the exported model takes any number of samples; else as many as the sample has.
        rtol: How far, relative to the value, an output may be off; given together with ``atol``.
        atol: How far an output may be off at all. By default both are those of :func:`torch.testing.assert_close` for
            ``"torchexport"``, and 1e-3 and 1e-4 for ``"onnx"``.

    Raises:
        TypeError: The sample or the outputs are no tensors, nor sequences or mappings of tensors.
        ValueError: There is no such format, the model is sharded over processes, there are too few or many names, or
            one stands for two of them.
        ModuleNotFoundError: A package that the format needs is not installed.
        ExportError: The model cannot be exported, or the file does not compute what the model does. Nothing is left.

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
    _check_arguments(model, save_format, (rtol, atol))
    with preserve_rng_state(), torch.no_grad():
        prepared = _transformed(_copy_on_cpu(model), transforms)
        call = make_call(prepared, move_batch(sample_input, torch.device("cpu")), input_names, output_names)
        if dynamic_batch and call.num_samples == 1:
            call = call.with_samples(2)  # torch.export takes a 1 for a number that never changes
        program = _exported(call, dynamic_batch=dynamic_batch)
        with _whole_file(str(save_path), save_format) as path:
            run = _WRITERS[save_format](program, call, path, output_names)
            _compare(run, call, save_format, rtol, atol)
            if dynamic_batch and call.num_samples is not None:
                _compare(run, call.with_samples(call.num_samples + 1), save_format, rtol, atol)


def _check_arguments(model: nn.Module, save_format: str, tolerances: tuple[float | None, ...]) -> None:
    if save_format == "torchscript":
        raise ValueError(
            "save_format='torchscript' is not offered, as torch has deprecated TorchScript. Say 'torchexport'; "
            "torch.export.load reads it."
        )
    if save_format not in _SUFFIXES:
        raise ValueError(f"save_format must be 'torchexport' or 'onnx', got {save_format!r}.")
    if (tolerances[0] is None) != (tolerances[1] is None):
        raise ValueError(f"rtol and atol are given together or not at all, got rtol={tolerances[0]}, {tolerances[1]}.")
    if save_format == "onnx":
        require_product("onnx", "onnx")
        require_product("onnxscript", "onnx")
    if any(hasattr(one, "device_mesh") for one in itertools.chain(model.parameters(), model.buffers())):
        raise ValueError(
            "The model is sharded over processes and cannot be exported as it is. Get the full weights with "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options="
            "StateDictOptions(full_state_dict=True, cpu_offload=True)), load them in one process, and export there."
        )


def _copy_on_cpu(model: nn.Module) -> nn.Module:
    """Return a copy; weights on another device are copied from there, so that this needs no second place on it."""
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    model = getattr(model, "_orig_mod", model)  # what torch.compile(model) has wrapped
    elsewhere = [
        one
        for one in itertools.chain(model.parameters(), model.buffers())
        if type(one) in {nn.Parameter, Tensor} and not one.is_cpu
    ]
    copies = {id(one): _copied(one) for one in elsewhere}
    return copy.deepcopy(model, copies).to("cpu").eval()


def _copied(weight: Tensor) -> Tensor:
    tensor = weight.detach().to("cpu", copy=True)
    return nn.Parameter(tensor, requires_grad=False) if isinstance(weight, nn.Parameter) else tensor


def _transformed(model: nn.Module, transforms: Any) -> nn.Module:
    for transform in [transforms] if callable(transforms) else transforms or []:
        changed = transform(model)
        model = model if changed is None else changed
    return model.eval().requires_grad_(requires_grad=False)


def _exported(call: ExportedCall, *, dynamic_batch: bool) -> torch.export.ExportedProgram:
    places, names = call.arguments()
    shapes = None
    if dynamic_batch:
        batch = torch.export.Dim("batch")
        shapes = {name: _shapes(value, call, batch) for name, value in call.inputs.items()}
    try:
        return torch.export.export(call.module, places, names, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        remedy = " If the number of samples may stay as it is, say dynamic_batch=False." if dynamic_batch else ""
        raise ExportError(
            f"torch.export could not follow the model's forward pass: {type(error).__name__}: {error}{remedy}"
        ) from error


def _shapes(value: Any, call: ExportedCall, batch: Any) -> Any:
    if isinstance(value, Tensor):
        return {0: batch} if call.is_batched(value) else None
    if isinstance(value, dict):
        return {key: _shapes(item, call, batch) for key, item in value.items()}
    return [_shapes(item, call, batch) for item in value] if isinstance(value, (list, tuple)) else None


def _write_torchexport(
    program: torch.export.ExportedProgram, call: ExportedCall, path: Path, output_names: Sequence[str] | None
) -> Callable[[ExportedCall], list[Tensor]]:
    """Write the file, and return what runs it."""
    del call, output_names
    torch.export.save(program, path)
    module = torch.export.load(path).module()

    def run(call: ExportedCall) -> list[Tensor]:
        places, names = call.arguments()
        return list(tensors_in(module(*places, **names)))

    return run


def _write_onnx(
    program: torch.export.ExportedProgram, call: ExportedCall, path: Path, output_names: Sequence[str] | None
) -> Callable[[ExportedCall], list[Tensor]]:
    """Write the file, and return what runs it."""
    outputs = call.outputs()
    if output_names is None and isinstance(outputs, dict):
        output_names = _names_besides(call.inputs, list(outputs))
    both = sorted(set(output_names or ()) & call.inputs.keys())
    if both:
        raise ValueError(f"output_names must not be names of inputs in ONNX, got {both} for both. Choose others.")
    inputs = list(tensors_in(call.inputs))
    input_names = list(call.inputs) if len(inputs) == len(call.inputs) else None
    written = torch.onnx.export(program, dynamo=True, input_names=input_names, output_names=output_names, verbose=False)
    assert written is not None
    written.save(path, external_data=False)
    names = [one.name for one in written.model.graph.inputs]
    session = _onnx_session(path)

    def run(call: ExportedCall) -> list[Tensor]:
        arrays = [one.numpy() for one in tensors_in(call.inputs)]
        return [torch.as_tensor(one) for one in session.run(None, dict(zip(names, arrays, strict=True)))]

    return run


def _names_besides(inputs: Collection[str], outputs: list[str]) -> list[str]:
    """Return names of outputs of which none is an input's: in ONNX a name stands for one value."""
    names: list[str] = []
    for output in outputs:
        name = output
        while name in inputs or (name != output and name in outputs) or name in names:
            name += "_output"
        names.append(name)
    return names


def _onnx_session(path: Path) -> Any:
    if importlib.util.find_spec("onnxruntime") is not None:
        return importlib.import_module("onnxruntime").InferenceSession(str(path))
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415  (optional)

    return ReferenceEvaluator(str(path))


_WRITERS = {"torchexport": _write_torchexport, "onnx": _write_onnx}


def _compare(
    run: Callable[[ExportedCall], list[Tensor]],
    call: ExportedCall,
    save_format: str,
    rtol: float | None,
    atol: float | None,
) -> None:
    if rtol is None and save_format == "onnx":
        rtol, atol = 1e-3, 1e-4
    samples = "the sample" if call.num_samples is None else f"{call.num_samples} samples"
    try:
        computed = run(call)
    except Exception as error:
        raise ExportError(f"The exported model fails on {samples}: {type(error).__name__}: {error}") from error
    try:
        torch.testing.assert_close(computed, list(tensors_in(call.outputs())), rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        raise ExportError(
            f"The exported model computes something else than the original on {samples}: {error}"
        ) from error


@contextlib.contextmanager
def _whole_file(target: str, save_format: str) -> Iterator[Path]:
    """Give a path to write to; what was written is put in its place once the block has ended without an error."""
    is_remote = "://" in target
    folder = None if is_remote else Path(target).absolute().parent
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as held:
        # Large ONNX models come with a second file, which they know by its name; torch wants its own ending.
        name = Path(target).name if save_format == "onnx" else f"model{_SUFFIXES[save_format]}"
        path = Path(held) / name
        yield path
        beside = target[: len(target) - len(Path(target).name)]
        for also in [one for one in Path(held).iterdir() if one != path]:
            _put(also, beside + also.name)
        _put(path, target)


def _put(path: Path, target: str) -> None:
    if "://" not in target:
        path.replace(target)
        return
    from fsspec.core import url_to_fs  # noqa: PLC0415  (takes a while)

    system, place = url_to_fs(target)
    system.makedirs(place.rpartition("/")[0], exist_ok=True)
    system.put_file(str(path), place)

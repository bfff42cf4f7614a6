"""Tensors in safetensors files."""

import contextlib
import copy
import functools
import gc
import hashlib
import json
import multiprocessing
import os
import tracemalloc
import types
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from composer.checkpoint import CheckpointError, tensor_file
from composer.checkpoint.tensor_file import CopyMemory, pack_tensors, read_shapes, read_tensors
from composer.core import NotSerializableError

NAMES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex128",
    "complex64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
]


def write(path, tensors):
    packed = pack_tensors(tensors)
    path.write_bytes(b"".join(packed.pieces))
    return path


def as_bytes(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def random_tensor(dtype, shape):
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.arange(count).remainder(2).bool().reshape(shape)
    data = torch.arange(count * torch.empty(0, dtype=dtype).element_size()).to(torch.uint8)
    return data.view(dtype).reshape(shape)


class OnlyCopies(torch.Tensor):
    """A tensor wrapper that only implements copies."""

    @staticmethod
    def __new__(cls, inner):
        """Return a wrapper with the inner tensor's properties."""
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Copy from the inner one."""
        if function is not torch.ops.aten.copy_.default:
            return NotImplemented
        return function(args[0], args[1].inner, **(kwargs or {}))


def use_memory(body):
    """Use new memory, release that of a parent process, and use the new memory again."""
    kept = [torch.ones(32 << 20, dtype=torch.uint8) for _ in range(4)]
    assert body[:2] == b"\0\0"
    body.close()
    assert [one.sum().item() for one in kept] == [32 << 20] * 4


class TestPackTensors:
    @pytest.mark.parametrize("dtype", [getattr(torch, name) for name in NAMES])
    @pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
    def test_dtype_round_trip(self, dtype, shape, tmp_path):
        """Tensors of any dtype, also scalars and empty ones, are restored byte for byte."""
        tensor = random_tensor(dtype, shape)

        read = read_tensors(write(tmp_path / "file", {"one": tensor, "two": torch.ones(3, dtype=torch.bool)}))

        assert (read["one"].dtype, read["one"].shape) == (tensor.dtype, tensor.shape)
        assert as_bytes(read["one"]) == as_bytes(tensor)
        assert read["two"].all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
    def test_format_is_safetensors(self, dtype, tmp_path):
        """The package reads written files, and its files are read."""
        tensors = {
            "b.weight": random_tensor(dtype, (3, 5)),
            "a": random_tensor(torch.float64, (2,)),
            "é": torch.ones(()),
        }
        save_file(tensors, tmp_path / "theirs")

        actual = write(tmp_path / "ours", tensors)

        for read in (load_file(actual), read_tensors(tmp_path / "theirs")):
            assert read.keys() == tensors.keys()
            assert all(as_bytes(read[name]) == as_bytes(tensor) for name, tensor in tensors.items())

    @settings(max_examples=40, deadline=None)
    @given(
        st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__"),
            st.tuples(
                st.sampled_from([torch.float64, torch.float16, torch.uint8, torch.complex128]), st.integers(0, 9)
            ),
            max_size=6,
        )
    )
    def test_any_names_and_sizes(self, tmp_path_factory, wanted):
        """The package reads files with any tensor names and small sizes."""
        tensors = {name: random_tensor(dtype, (count,)) for name, (dtype, count) in wanted.items()}
        path = write(tmp_path_factory.mktemp("any") / "file", tensors)

        expected, actual = load_file(path), read_tensors(path)

        assert expected.keys() == actual.keys() == tensors.keys()
        assert all(as_bytes(expected[name]) == as_bytes(tensor) for name, tensor in tensors.items())
        assert all(actual[name].dtype == tensor.dtype for name, tensor in tensors.items())

    def test_strides_round_trip(self, tmp_path):
        """Channels-last strides are restored, gaps are removed."""
        last = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
        gaps = torch.rand(4, 6)[:, ::2]

        read = read_tensors(write(tmp_path / "file", {"last": last, "gaps": gaps, "turned": torch.rand(2, 3).t()}))

        assert torch.equal(read["last"], last)
        assert read["last"].stride() == last.stride()
        assert torch.equal(read["gaps"], gaps)
        assert read["gaps"].is_contiguous()
        assert read["turned"].stride() == (1, 3)

    def test_copy(self):
        """Later changes of the run do not change the copy."""
        weight = torch.zeros(2)

        packed = pack_tensors({"weight": weight})
        weight += 1

        assert bytes(packed.pieces[1]) == bytes(8)

    @pytest.mark.parametrize("copy", [True, False])
    def test_without_a_copy(self, copy, tmp_path):
        """Without a copy the file is equal; non-contiguous tensors are copied."""
        numbers = torch.tensor([1 + 2j, 3 - 4j])
        tensors = {
            "turned": torch.rand(3, 2).t(),
            "conjugate": numbers.conj(),
            "empty": torch.empty(0),
            "a": torch.ones(3),
        }

        packed = pack_tensors(tensors, copy=copy)
        tensors["a"] += 1
        (tmp_path / "file").write_bytes(b"".join(packed.pieces))

        read = read_tensors(tmp_path / "file")
        assert torch.equal(read["turned"], tensors["turned"])
        assert read["conjugate"].tolist() == [1 - 2j, 3 + 4j]
        assert read["a"].tolist() == ([1.0] * 3 if copy else [2.0] * 3)
        assert packed.size == (tmp_path / "file").stat().st_size

    def test_large_tensors_are_copied(self, tmp_path):
        """Above some megabytes memory is allocated differently; the file is equal."""
        tensors = {"large": torch.arange(3_000_000, dtype=torch.float32), "small": torch.tensor(True)}

        read = load_file(write(tmp_path / "file", tensors))

        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())

    def test_memory_is_reused_for_one_more_copy(self):
        """The memory of a copy serves the next one of its size; memory that the next one does not need is released."""
        memory, tensors = CopyMemory(), {"weight": torch.zeros(2 << 20)}
        first = pack_tensors(tensors, memory=memory)
        memory.give([first])
        other = pack_tensors({"weight": torch.zeros(3 << 20)}, memory=memory)
        memory.give([other])

        same_size = pack_tensors({"weight": torch.ones(3 << 20)}, memory=memory)
        former_size = pack_tensors(tensors, memory=memory)

        assert same_size.pieces[-1].obj is other.pieces[-1].obj
        assert former_size.pieces[-1].obj is not first.pieces[-1].obj

    def test_registered_memory_is_released(self, monkeypatch):
        """CUDA forgets an address before the system may use it for other memory, and only in the same process."""
        calls = []
        runtime = types.SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: calls.append((address, size, flags)) or 0,
            cudaHostUnregister=calls.append,
        )
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        memory = CopyMemory()

        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        bodies = [memory.take(size << 20, torch.device("cuda", 0)) for size in (4, 8)]
        addresses = [torch.frombuffer(body, dtype=torch.uint8).data_ptr() for body in bodies]
        assert calls == [(addresses[0], 4 << 20, 0), (addresses[1], 8 << 20, 0)]
        with monkeypatch.context() as in_child:
            in_child.setattr(os, "getpid", lambda: 0)
            del bodies[0]
            gc.collect()
        bodies.clear()
        gc.collect()

        assert calls[2:] == addresses[1:]

    def test_registered_memory_in_a_forked_process(self, monkeypatch):
        """A forked process releases it without touching other memory, which may not get its addresses."""
        runtime = types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        body = CopyMemory().take(64 << 20, torch.device("cuda", 0))
        body[:] = b"1" * len(body)

        process = multiprocessing.get_context("fork").Process(target=use_memory, args=(body,))
        process.start()
        process.join()

        assert process.exitcode == 0
        assert body[:2] == b"11"

    @pytest.mark.gpu
    @pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
    def test_copies_of_cuda_tensors_are_pinned(self):
        """They have the values of the moment, also behind waiting kernels and after a fork, and are reused."""
        memory, weight = CopyMemory(), torch.zeros(1 << 22, device="cuda")
        address = None
        for step in range(3):
            torch.cuda._sleep(10**8)
            weight += 1
            packed = pack_tensors({"weight": weight, "steps": torch.tensor(step)}, memory=memory)
            weight += 1
            body = torch.frombuffer(packed.pieces[-1], dtype=torch.uint8)
            assert body.is_pinned()
            assert address in (None, body.data_ptr())
            assert body[8:].view(torch.float32).unique().tolist() == [2.0 * step + 1]
            address = body.data_ptr()
            child = multiprocessing.get_context("fork").Process(target=int)
            child.start()
            memory.give([packed])
        child.join()
        assert child.exitcode == 0

        other = pack_tensors({"weight": weight[: 1 << 21]}, memory=memory)
        memory.give([other])  # releases the first memory
        del packed, body

        assert not torch.empty(1 << 22).is_pinned()  # may have its address
        torch.cuda.synchronize()

    @pytest.mark.gpu
    def test_copies_of_conjugate_cuda_views(self):
        """They are resolved when their values are there."""
        numbers = torch.full((1 << 20,), 1 + 2j, device="cuda")
        torch.cuda._sleep(10**8)
        views = {"conjugate": numbers.conj(), "negative": numbers.conj().imag}

        packed = pack_tensors(views, memory=CopyMemory())

        body = torch.frombuffer(packed.pieces[-1], dtype=torch.float32)
        assert body[: 2 << 20].view(torch.complex64).unique().tolist() == [1 - 2j]
        assert body[2 << 20 :].unique().tolist() == [-2.0]

    @pytest.mark.gpu
    def test_memory_that_cannot_be_pinned(self, monkeypatch):
        """Copies go to memory that is not pinned, and no later kernel raises the error of CUDA."""
        runtime = torch.cuda.cudart()
        register = functools.partial(runtime.cudaHostRegister, 0)
        refusing = types.SimpleNamespace(cudaHostRegister=lambda _, size, flags: register(size, flags))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)

        packed = pack_tensors({"weight": torch.ones(1 << 22, device="cuda")}, memory=CopyMemory())

        body = torch.frombuffer(packed.pieces[-1], dtype=torch.float32)
        assert not body.is_pinned()
        assert (torch.ones(2, device="cuda") + 1).sum().item() == 4.0
        assert body.unique().tolist() == [1.0]

    def test_conjugate_and_negative_views(self, tmp_path):
        """Conjugate and negative views are resolved."""
        numbers = torch.tensor([1 + 2j, 3 - 4j])
        tensors = {"conjugate": numbers.conj(), "negative": numbers.conj().imag, "weight": nn.Parameter(torch.ones(2))}

        read = read_tensors(write(tmp_path / "file", tensors))

        assert read["conjugate"].tolist() == [1 - 2j, 3 + 4j]
        assert read["negative"].tolist() == [-2.0, 4.0]
        assert not read["weight"].requires_grad

    def test_tied_weights_have_both_names(self, tmp_path):
        """A plain load of the file has every name of the model."""
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        later = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))

        later.load_state_dict(load_file(write(tmp_path / "file", model.state_dict())), strict=True)

        assert torch.equal(later[1].weight, model[0].weight)

    def test_tensor_subclasses(self):
        """A tensor subclass without batched copies is supported."""
        packed = pack_tensors({"a": torch.ones(2), "b": OnlyCopies(torch.full((3,), 2.0))})

        assert torch.frombuffer(packed.pieces[1], dtype=torch.float32).tolist() == [1, 1, 2, 2, 2]

    def test_unsupported_dtypes_raise(self):
        """A tensor that torch cannot copy raises with its name."""
        with pytest.raises(NotSerializableError, match=r"body\.weight: a tensor of int4"):
            pack_tensors({"body.weight": torch.empty(2, dtype=torch.uint8).view(torch.int4)})

    @pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
    def test_invalid_names_raise(self, name):
        """A name that the format does not support raises."""
        with pytest.raises(NotSerializableError, match="a tensor"):
            pack_tensors({name: torch.ones(1)})


def header(path, content, rest=b""):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + rest)
    return path


class TestReadTensors:
    def test_equals_safetensors(self, tmp_path):
        """Tensors and hash equal those of the package and the system; the file is read once."""
        image = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
        tensors = {
            "a": torch.rand(700, 500),
            "b": torch.rand(3).bfloat16(),
            "none": torch.empty(0, 2),
            "n": torch.ones(()),
            "image": image,
        }
        path = write(tmp_path / "file", tensors | {"c": torch.ones(2, dtype=torch.complex128)})
        digest = hashlib.sha256()

        read = read_tensors(path, digest)

        assert digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
        assert all(as_bytes(read[name]) == as_bytes(tensor) for name, tensor in load_file(path).items())
        assert read["c"].dtype is torch.complex128
        assert read["image"].stride() == image.stride()

    def test_large_file(self, tmp_path):
        """Tensors of a file that is read into huge pages are correct, and each can be kept or copied by itself."""
        tensors = {f"{number:02}": torch.rand(number << 15) for number in range(12)}
        path = write(tmp_path / "file", tensors)
        digest = hashlib.sha256()

        read = read_tensors(path, digest)

        assert digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in read.values())
        kept = copy.deepcopy(read["05"])
        del read
        assert torch.equal(kept, tensors["05"])

    @pytest.mark.parametrize("size", [5, 3 << 20])
    def test_alignment(self, tmp_path, size):
        """Each tensor is aligned like torch's, so that kernels compute the same."""
        read = read_tensors(write(tmp_path / "file", {"a": torch.rand(size), "b": torch.rand(7), "c": torch.ones(1)}))

        assert len({tensor.untyped_storage().data_ptr() for tensor in read.values()}) == 3
        assert {tensor.data_ptr() % 64 for tensor in read.values()} == {0}

    def test_values_outlive_the_file(self, tmp_path):
        """Tensors are in memory, and independent of each other."""
        path = write(tmp_path / "file", {"weight": torch.ones(2 << 20), "other": torch.ones(3)})

        read = read_tensors(path)
        path.write_bytes(b"")
        read["weight"].zero_()

        assert read["other"].sum() == 3
        maps = Path("/proc/self/maps")
        assert not maps.exists() or str(path) not in maps.read_text()

    @pytest.mark.parametrize("large", [False, True])
    @pytest.mark.parametrize("change", ["cut off", "longer"])
    def test_changed_while_reading(self, tmp_path, change, large):
        """A file whose length changes after its header was read raises."""
        path = write(tmp_path / "file", {name: torch.rand(2 << 20 if large else 100) for name in "abc"})
        size = path.stat().st_size

        class Digest:
            def update(self, _):
                os.truncate(path, size - 40 if change == "cut off" else size + 1)

        with pytest.raises(CheckpointError, match="file has been changed while it was read"):
            read_tensors(path, Digest())

    def test_header_of_invalid_length(self, tmp_path):
        """A header longer than the format allows is not read, also in a file of that length."""
        path = tmp_path / "file"
        path.write_bytes((100_000_001).to_bytes(8, "little"))
        os.truncate(path, 200_000_000)

        tracemalloc.start()
        with pytest.raises(CheckpointError, match="is not a complete safetensors file"):
            read_shapes(path)
        largest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

        assert largest < 1_000_000

    def test_missing_file_raises(self, tmp_path):
        """A missing file raises with its name."""
        for function in (read_tensors, read_shapes):
            with pytest.raises(CheckpointError, match="nothing cannot be read: No such file"):
                function(tmp_path / "nothing")

    @pytest.mark.parametrize("dtype", ["C64", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
    def test_newer_dtype_names(self, dtype, tmp_path):
        """Dtypes that only recent releases of the package write are read."""
        expected = random_tensor(tensor_file._DTYPES[dtype], (2,))
        entry = {"dtype": dtype, "shape": [2], "data_offsets": [0, expected.nbytes]}
        path = header(tmp_path / "file", {"a": entry}, bytes(as_bytes(expected)))

        read = read_tensors(path)["a"]

        assert (read.dtype, as_bytes(read)) == (expected.dtype, as_bytes(expected))

    @settings(max_examples=200, deadline=None)
    @given(
        st.sampled_from(["dtype", "shape", "data_offsets"]),
        st.sampled_from(
            [None, 3, "F32", "F16", "what", [], [2], [1, 2], [4, 2], [0, 8], [0, 16], [8, 24], [-8, 8], [2.0]]
        ),
        st.sampled_from(["a", "b"]),
        st.integers(-1, 1),
    )
    def test_invalid_headers_raise(self, tmp_path_factory, field, value, name, more):
        """A header that the package rejects raises."""
        content = {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2, 1], "data_offsets": [8, 16]},
        }
        content[name][field] = value
        path = header(tmp_path_factory.mktemp("any") / "file", content, bytes(16 + more))

        try:
            expected = load_file(path)
        except (SafetensorError, RuntimeError, KeyError):
            expected = None

        if expected is None:
            with pytest.raises(CheckpointError, match="file is not a complete safetensors file"):
                read_tensors(path)
        else:
            read = read_tensors(path)
            assert {name: tensor.shape for name, tensor in read.items()} == {
                name: tensor.shape for name, tensor in expected.items()
            }

    @pytest.mark.parametrize("shape", ["", {}, None, 0, [0, 1 << 63], [0, -1], [0, True], [0, 0.0]], ids=str)
    def test_invalid_shapes_raise(self, tmp_path, shape):
        """A shape that is not a list of dimension sizes raises."""
        path = header(tmp_path / "file", {"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}})
        scalar = header(tmp_path / "scalar", {"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, 1]}}, b"1")

        for opened in (path, scalar):
            with pytest.raises(CheckpointError, match="is not a complete safetensors file"):
                read_shapes(opened)

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\xff" * 8,
            (1 << 40).to_bytes(8, "little") + b"{}",
            b"\x02" + bytes(7) + b"[]",
            b"\x05" + bytes(7) + b"[" * 5,
            b"no file",
        ],
    )
    def test_other_files_raise(self, content, tmp_path):
        """A file without a header, or with one of invalid length, raises with its name."""
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)

        for opened in (read_tensors, read_shapes):
            with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete safetensors file"):
                opened(path)

    @pytest.mark.parametrize(
        "metadata", ["[]", "{", '{"dtypes": 3}', '{"what": {}}', '{"strides": {"w": ["a"]}}', "[" * 9999]
    )
    def test_foreign_metadata_raise(self, metadata, tmp_path):
        """Metadata under this library's key with other content raise."""
        path = tmp_path / "file"
        save_file({"w": torch.ones(4)}, path, metadata={"composer": metadata})

        with pytest.raises(CheckpointError, match="metadata is not as composer writes it"):
            read_tensors(path)

    @pytest.mark.parametrize(
        "said",
        [
            {"strides": {"w": [1 << 60, 1]}},
            {"strides": {"w": [0, 0]}},
            {"strides": {"w": [1]}},
            {"strides": {"x": [2, 1]}},
            {"dtypes": {"w": ["float99", [2, 2]]}},
            {"dtypes": {"w": ["complex128", [1 << 60]]}},
        ],
    )
    def test_invalid_metadata_raise(self, said, tmp_path):
        """Strides and dtypes that do not match the tensor raise; no memory is allocated."""
        path = tmp_path / "file"
        save_file({"w": torch.ones(2, 2, dtype=torch.uint8)}, path, metadata={"composer": json.dumps(said)})

        with pytest.raises(CheckpointError, match="has metadata that does not fit its tensors"):
            read_tensors(path)

    def test_shapes_only(self, tmp_path):
        """Dtypes and shapes are read without the tensors, also of dtypes stored as bytes."""
        path = write(tmp_path / "file", {"a": torch.ones(2, 3), "c": torch.ones(4, dtype=torch.complex128)})

        assert read_shapes(path) == {"a": ("F32", (2, 3)), "c": ("complex128", (4,))}

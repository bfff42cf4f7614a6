"""Tensors in safetensors files."""

import hashlib
import json
import mmap
import os
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from torch import nn

from composer.checkpoint import CheckpointError, tensor_file
from composer.checkpoint.packing import pack_tensors
from composer.checkpoint.tensor_file import allocate_tensors, map_tensors, read_shapes, read_tensors
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
    """A tensor around another one, for which nothing is written but how it is copied."""

    @staticmethod
    def __new__(cls, inner):
        """Look like the inner one."""
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Copy from the inner one."""
        if function is not torch.ops.aten.copy_.default:
            return NotImplemented
        return function(args[0], args[1].inner, **(kwargs or {}))


class TestPackTensors:
    @pytest.mark.parametrize("dtype", [getattr(torch, name) for name in NAMES])
    @pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
    def test_every_dtype_comes_back(self, dtype, shape, tmp_path):
        """Tensors of any dtype, also of one number or none, are the same bytes again."""
        tensor = random_tensor(dtype, shape)

        read = read_tensors(write(tmp_path / "file", {"one": tensor, "two": torch.ones(3, dtype=torch.bool)}))

        assert (read["one"].dtype, read["one"].shape) == (tensor.dtype, tensor.shape)
        assert as_bytes(read["one"]) == as_bytes(tensor)
        assert read["two"].all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
    def test_the_format_is_that_of_safetensors(self, dtype, tmp_path):
        """The package itself reads what we write, and we read what it writes."""
        tensors = {
            "b.weight": random_tensor(dtype, (3, 5)),
            "a": random_tensor(torch.float64, (2,)),
            "é": torch.ones(()),
        }
        save_file(tensors, tmp_path / "theirs")

        ours = write(tmp_path / "ours", tensors)

        for read in (load_file(ours), read_tensors(tmp_path / "theirs")):
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
        """Whatever tensors are called and however small they are, the package reads what is written."""
        tensors = {name: random_tensor(dtype, (count,)) for name, (dtype, count) in wanted.items()}
        path = write(tmp_path_factory.mktemp("any") / "file", tensors)

        theirs, ours = load_file(path), read_tensors(path)

        assert theirs.keys() == ours.keys() == tensors.keys()
        assert all(as_bytes(theirs[name]) == as_bytes(tensor) for name, tensor in tensors.items())
        assert all(ours[name].dtype == tensor.dtype for name, tensor in tensors.items())

    def test_strides_come_back(self, tmp_path):
        """A tensor in channels-last order has that order again, and one with gaps has none."""
        last = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
        gaps = torch.rand(4, 6)[:, ::2]

        read = read_tensors(write(tmp_path / "file", {"last": last, "gaps": gaps, "turned": torch.rand(2, 3).t()}))

        assert torch.equal(read["last"], last)
        assert read["last"].stride() == last.stride()
        assert torch.equal(read["gaps"], gaps)
        assert read["gaps"].is_contiguous()
        assert read["turned"].stride() == (1, 3)

    def test_a_copy_is_made(self):
        """What the run changes later is not in the copy."""
        weight = torch.zeros(2)

        packed = pack_tensors({"weight": weight})
        weight += 1

        assert bytes(packed.pieces[1]) == bytes(8)

    @pytest.mark.parametrize("copy", [True, False])
    def test_without_a_copy(self, copy, tmp_path):
        """Without a copy the file is the same; what does not lie in order is copied all the same."""
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
        """Above some megabytes memory comes from elsewhere; the file is the same."""
        tensors = {"large": torch.arange(3_000_000, dtype=torch.float32), "small": torch.tensor(True)}

        read = load_file(write(tmp_path / "file", tensors))

        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())

    def test_views_that_cannot_be_seen_as_bytes(self, tmp_path):
        """Conjugate and negative views are written as the numbers that they show."""
        numbers = torch.tensor([1 + 2j, 3 - 4j])
        tensors = {"conjugate": numbers.conj(), "negative": numbers.conj().imag, "weight": nn.Parameter(torch.ones(2))}

        read = read_tensors(write(tmp_path / "file", tensors))

        assert read["conjugate"].tolist() == [1 - 2j, 3 + 4j]
        assert read["negative"].tolist() == [-2.0, 4.0]
        assert not read["weight"].requires_grad

    def test_tied_weights_are_there_under_both_names(self, tmp_path):
        """A plain load of the file has every name that the model asks for."""
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        later = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))

        later.load_state_dict(load_file(write(tmp_path / "file", model.state_dict())), strict=True)

        assert torch.equal(later[1].weight, model[0].weight)

    def test_kinds_of_tensors_that_are_copied_one_by_one(self):
        """A kind of tensor that knows how to be copied, and not how with others, is written like any."""
        packed = pack_tensors({"a": torch.ones(2), "b": OnlyCopies(torch.full((3,), 2.0))})

        assert torch.frombuffer(packed.pieces[1], dtype=torch.float32).tolist() == [1, 1, 2, 2, 2]

    def test_dtypes_that_torch_cannot_copy(self):
        """A tensor that torch itself cannot do anything with is refused by its name."""
        with pytest.raises(NotSerializableError, match=r"body\.weight: a tensor of int4"):
            pack_tensors({"body.weight": torch.empty(2, dtype=torch.uint8).view(torch.int4)})

    @pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
    def test_impossible_names(self, name):
        """A name that the format cannot hold is refused."""
        with pytest.raises(NotSerializableError, match="a tensor"):
            pack_tensors({name: torch.ones(1)})


def header(path, content, rest=b""):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + rest)
    return path


def read(path):
    room = allocate_tensors(path)
    room.read(hashlib.sha256())
    room.rearrange()
    return room.tensors


class TestMakeRoom:
    def test_same_as_the_package(self, tmp_path):
        """Tensors and hash are those that the package and the system find, of a file that is read once."""
        tensors = {
            "a": torch.rand(700, 500),
            "b": torch.rand(3).bfloat16(),
            "none": torch.empty(0, 2),
            "n": torch.ones(()),
        }
        path = write(tmp_path / "file", tensors | {"c": torch.ones(2, dtype=torch.complex128)})

        digest = hashlib.sha256()
        room = allocate_tensors(path)
        room.read(digest)
        room.rearrange()
        found = room.tensors

        assert digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
        assert all(as_bytes(found[name]) == as_bytes(tensor) for name, tensor in load_file(path).items())
        assert found["c"].dtype is torch.complex128

    def test_memory_of_its_own(self, tmp_path):
        """Each tensor lies where torch would put it, so that kernels compute the same as with one made by torch."""
        found = read(write(tmp_path / "file", {"a": torch.rand(5), "b": torch.rand(7)}))

        assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 2
        assert all(tensor.data_ptr() % 64 == torch.empty(5).data_ptr() % 64 for tensor in found.values())

    def test_cut_off_while_it_is_read(self, tmp_path, monkeypatch):
        """A file that becomes shorter after its header was checked is refused."""
        path = write(tmp_path / "file", {"a": torch.rand(100)})
        opened = tensor_file._opened

        def cut(path):
            file = opened(path)
            path.write_bytes(path.read_bytes()[:-40])
            return file

        monkeypatch.setattr(tensor_file, "_opened", cut)

        with pytest.raises(CheckpointError, match="it ends within a tensor"):
            read(path)

    def test_cut_off_before_it_is_read(self, tmp_path):
        """A file that becomes shorter after its memory was made is refused."""
        path = write(tmp_path / "file", {"a": torch.rand(100)})
        room = allocate_tensors(path)
        path.write_bytes(path.read_bytes()[:-40])

        with pytest.raises(CheckpointError, match="it ends within a tensor"):
            room.read(hashlib.sha256())

    @pytest.mark.parametrize("change", ["header", "length"])
    def test_changed_before_it_is_read(self, tmp_path, change):
        """A file whose tensors have other names by now, or that has become longer, is refused."""
        path = write(tmp_path / "file", {"a": torch.zeros(4), "b": torch.ones(4)})
        room = allocate_tensors(path)
        if change == "header":
            write(path, {"a": torch.zeros(4), "c": torch.ones(4)})
        else:
            path.write_bytes(path.read_bytes() + b"\0")

        with pytest.raises(CheckpointError, match="has been changed while it was read"):
            room.read(hashlib.sha256())

    def test_shapes_before_values(self, tmp_path):
        """What the tensors look like is there at once, also of those whose items lie in another order or are bytes."""
        tensors = {
            "image": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            "number": torch.ones(2, dtype=torch.complex128),
            "both": torch.rand(3, 4, dtype=torch.complex64).t(),
        }
        room = allocate_tensors(write(tmp_path / "file", tensors))
        before = {name: (one.shape, one.dtype, one.stride()) for name, one in room.tensors.items()}

        room.read(hashlib.sha256())
        room.rearrange()

        assert before == {name: (one.shape, one.dtype, one.stride()) for name, one in tensors.items()}
        assert all(room.tensors[name].stride() == one.stride() for name, one in tensors.items())
        assert all(torch.equal(room.tensors[name], one) for name, one in tensors.items())

    @pytest.mark.parametrize("dtype", ["C64", "F8_E5M2FNUZ"])
    def test_names_that_we_do_not_write(self, dtype, tmp_path):
        """A dtype that we write as bytes is refused under its own name: the file is not ours."""
        theirs = {"C64": torch.complex64, "F8_E5M2FNUZ": torch.float8_e5m2fnuz}[dtype]
        try:
            save_file({"a": random_tensor(theirs, (2,))}, tmp_path / "file")
        except KeyError:
            pytest.skip(f"this release of safetensors has no name for {theirs}")

        with pytest.raises(CheckpointError, match="is no whole safetensors file of ours"):
            read(tmp_path / "file")


class TestFindMemory:
    def test_finds_what_is_not_read_yet(self, tmp_path):
        """Memory is there for all of the tensors, and what was in it stays."""
        room = allocate_tensors(write(tmp_path / "file", {"a": torch.zeros(9 << 20), "b": torch.zeros(7)}))
        for tensor in room.tensors.values():
            tensor[-1] = 17.0
        if not tensor_file._find_memory(torch.empty(9 << 20)):
            pytest.skip("this system does not know the advice")
        before = resident()

        room.find_memory()

        assert resident() - before > 35 << 20
        assert all(tensor[-1] == 17.0 for tensor in room.tensors.values())

    @pytest.mark.parametrize("read_by_now", [0, 1, 2])
    def test_until_it_meets_the_reader(self, tmp_path, monkeypatch, read_by_now):
        """It begins with the last tensor, and ends at the one that is being read."""
        found = []
        monkeypatch.setattr(tensor_file, "_find_memory", lambda tensor: found.append(len(tensor)) or True)
        room = allocate_tensors(write(tmp_path / "file", {"a": torch.rand(1), "b": torch.rand(2), "c": torch.rand(3)}))
        digest = Counting(read_by_now, room.find_memory)

        room.read(digest)

        assert found == [3, 2, 1][: 3 - read_by_now]

    def test_a_system_that_cannot(self, tmp_path, monkeypatch):
        """A kernel that does not know the advice is asked once, and the tensors are read all the same."""
        asked = []
        monkeypatch.setattr(tensor_file, "_madvise", lambda: lambda *advice: asked.append(advice) or -1)
        room = allocate_tensors(write(tmp_path / "file", {"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}))

        room.find_memory()
        room.read(hashlib.sha256())

        assert len(asked) == 1
        assert room.tensors["a"].sum() == 1 << 20

    def test_another_system(self, tmp_path, monkeypatch):
        """Where the advice means something else, none is given."""
        asked = []
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(tensor_file, "_madvise", lambda: asked.append)

        allocate_tensors(write(tmp_path / "file", {"a": torch.ones(1 << 20)})).find_memory()

        assert asked == []


def resident():
    """Return how much memory of this process is there, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Counting:
    """A digest that calls something when so many tensors have been read, and the next one is."""

    def __init__(self, tensors, call):
        self._left, self._call = tensors + 1, call  # the header comes first

    def update(self, _):
        if self._left == 0:
            self._call()
        self._left -= 1


def maps(path):
    """Return whether a file is part of this process's memory; None where the system does not say."""
    found = Path("/proc/self/maps")
    return str(path) in found.read_text() if found.exists() else None


class TestMapTensors:
    def test_same_as_the_package(self, tmp_path):
        """Tensors and hash are those that the package and the system find."""
        image = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
        tensors = {"a": torch.rand(700, 500), "b": torch.rand(3).bfloat16(), "none": torch.empty(0, 2), "image": image}
        path = write(tmp_path / "file", tensors | {"c": torch.ones(2, dtype=torch.complex128), "n": torch.ones(())})
        digest = hashlib.sha256()

        found = map_tensors(path, digest).tensors

        assert digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
        assert all(as_bytes(found[name]) == as_bytes(tensor) for name, tensor in load_file(path).items())
        assert found["c"].dtype is torch.complex128
        assert found["image"].stride() == image.stride()

    def test_file_stays_as_it_is(self, tmp_path):
        """What is written into the tensors does not reach the file."""
        path = write(tmp_path / "file", {"a": torch.ones(100)})

        map_tensors(path, hashlib.sha256()).tensors["a"].zero_()

        assert load_file(path)["a"].sum() == 100

    def test_tensors_keep_it(self, tmp_path):
        """A part of a tensor is there as long as somebody holds it, and the file's memory no longer."""
        path = write(tmp_path / "file", {"a": torch.ones(100), "b": torch.ones(2)})

        part = map_tensors(path, hashlib.sha256()).tensors["a"][3:].view(-1, 1)

        assert part.sum() == 97
        assert maps(path) in (True, None)
        del part
        assert not maps(path)

    def test_changed_after_it_was_mapped(self, tmp_path):
        """A file that has been written, replaced or removed since is refused."""
        path = write(tmp_path / "file", {"a": torch.ones(100)})
        first = map_tensors(path, hashlib.sha256())
        first.check_unchanged()
        write(tmp_path / "other", {"a": torch.ones(100)}).rename(path)
        second = map_tensors(path, hashlib.sha256())
        path.unlink()

        for mapped in (first, second):
            with pytest.raises(CheckpointError, match="file has been changed while it was read"):
                mapped.check_unchanged()

    def test_a_system_that_cannot_read_ahead(self, tmp_path, monkeypatch):
        """Where the advice is unknown, the file is read before its memory is looked at, and refused if cut off."""
        path, cut = write(tmp_path / "file", {"a": torch.ones(1 << 20)}), tmp_path / "cut"
        monkeypatch.setattr(tensor_file, "_advise", lambda *_: cut.exists() and os.truncate(path, 1 << 20))

        assert map_tensors(path, hashlib.sha256()).tensors["a"].sum() == 1 << 20
        cut.touch()
        with pytest.raises(CheckpointError, match="cannot be read: it ends too early"):
            map_tensors(path, hashlib.sha256())

    def test_cut_off_before_it_is_mapped(self, tmp_path, monkeypatch):
        """A file that becomes shorter after its header was read is refused, and so is one with another header."""
        path = write(tmp_path / "file", {"a": torch.rand(100)})
        read_header = tensor_file._read_header

        def replaced(content):
            def read(path):
                header = read_header(path)
                path.write_bytes(content(path.read_bytes()))
                return header

            return read

        monkeypatch.setattr(tensor_file, "_read_header", replaced(lambda content: content[:-40]))
        with pytest.raises(CheckpointError, match="cannot be read: requested buffer length"):
            map_tensors(path, hashlib.sha256())

        write(path, {"a": torch.rand(100)})
        monkeypatch.setattr(tensor_file, "_read_header", replaced(lambda content: content.replace(b'"a"', b'"b"')))
        with pytest.raises(CheckpointError, match="has been changed while it was read"):
            map_tensors(path, hashlib.sha256())

    def test_no_file(self, tmp_path):
        """A file that is not there is refused with its name."""
        with pytest.raises(CheckpointError, match="nothing is no whole safetensors file"):
            map_tensors(tmp_path / "nothing", hashlib.sha256())


class TestReadTensors:
    def test_tensors_are_not_left_in_the_file(self, tmp_path):
        """What was read is still there when the file is overwritten."""
        path = write(tmp_path / "file", {"weight": torch.ones(100)})

        read = read_tensors(path)
        path.write_bytes(b"")

        assert read["weight"].sum() == 100

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
    def test_no_safetensors_file(self, content, tmp_path):
        """What has no header, or one of impossible length, is refused by its name."""
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)

        for opened in (read_tensors, allocate_tensors, read_shapes, lambda path: map_tensors(path, hashlib.sha256())):
            with pytest.raises(CheckpointError, match=r"model\.safetensors is no whole safetensors file"):
                opened(path)

    @pytest.mark.parametrize(
        "metadata", ["[]", "{", '{"dtypes": 3}', '{"what": {}}', '{"strides": {"w": ["a"]}}', "[" * 9999]
    )
    def test_metadata_of_others(self, metadata, tmp_path):
        """What is written in our name and is not ours is refused."""
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
    def test_impossible_metadata(self, said, tmp_path):
        """Strides and dtypes that do not fit the tensor are refused; no memory is taken for them."""
        path = tmp_path / "file"
        save_file({"w": torch.ones(2, 2, dtype=torch.uint8)}, path, metadata={"composer": json.dumps(said)})

        with pytest.raises(CheckpointError, match="says something of a tensor that cannot be"):
            read_tensors(path)

    def test_shapes_alone(self, tmp_path):
        """Dtypes and shapes are read without the tensors, also of dtypes that are kept as bytes."""
        path = write(tmp_path / "file", {"a": torch.ones(2, 3), "c": torch.ones(4, dtype=torch.complex128)})

        assert read_shapes(path) == {"a": ("F32", (2, 3)), "c": ("complex128", (4,))}

"""Files of tensors: what is written is read again, complete and in parts, and by the safetensors package."""

import contextlib
import io
import itertools
import math
from pathlib import Path

import attrs
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load
from torch import nn

from composer.checkpoint import CheckpointError, Manifest, manifest, reading
from composer.checkpoint.finding import open_checkpoint
from composer.checkpoint.folders import LocalFolder
from composer.checkpoint.layout import (
    Layout,
    TensorFile,
    TensorInfo,
    describe_tensors,
    pack_files,
    plan_files,
)
from composer.checkpoint.manifest import LAYOUT, MODEL, Content
from composer.checkpoint.reading import OpenCheckpoint, references, sharded_like
from composer.core import Timestamp
from composer.functional.dtensors import Region

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


def pack(tensors, *, copy=True, memory=None):
    """Return the layout, and the pieces of the file of a process that writes alone."""
    described = describe_tensors({MODEL: tensors}, is_first=True)
    layout, [writes] = plan_files([described])
    [pieces] = pack_files({MODEL: tensors}, writes, copy=copy, memory=memory).values()
    return layout, pieces


def write(tensors, **options):
    """Return the content of the file."""
    return b"".join(pack(tensors, **options)[1])


def round_trip(tensors, **options):
    """Return tensors that were written and read."""
    layout, pieces = pack(tensors, **options)
    content = Content(pieces)
    contents = {MODEL: b"".join(content)}
    layout = attrs.evolve(layout, files={MODEL: TensorFile(len(pieces[0]), content.blocks)})
    return opened(layout, {MODEL: content.record}, contents).tensors(MODEL)


def as_bytes(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def random_tensor(dtype, shape):
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.arange(count).remainder(2).bool().reshape(shape)
    data = torch.arange(count * torch.empty(0, dtype=dtype).element_size()).to(torch.uint8)
    return data.view(dtype).reshape(shape)


class TestPackParts:
    @pytest.mark.parametrize("dtype", [getattr(torch, name) for name in NAMES])
    @pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
    def test_dtype_round_trip(self, dtype, shape):
        """Tensors of any dtype, also scalars and empty ones, are restored byte for byte."""
        tensor = random_tensor(dtype, shape)

        read = round_trip({"one": tensor, "two": torch.ones(3, dtype=torch.bool)})

        assert (read["one"].dtype, read["one"].shape) == (tensor.dtype, tensor.shape)
        assert as_bytes(read["one"]) == as_bytes(tensor)
        assert read["two"].all()

    @settings(max_examples=40, deadline=None)
    @given(
        st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__"),
            st.tuples(
                st.sampled_from([torch.float64, torch.bfloat16, torch.uint8, torch.complex128]), st.integers(0, 9)
            ),
            max_size=6,
        )
    )
    def test_format_is_safetensors(self, wanted):
        """The package reads files with any names of tensors and small sizes; other dtypes are bytes there."""
        tensors = {name: random_tensor(dtype, (count,)) for name, (dtype, count) in wanted.items()}

        expected, actual = load(write(tensors)), round_trip(tensors)

        assert expected.keys() == actual.keys() == tensors.keys()
        assert all(as_bytes(expected[name]) == as_bytes(tensor) for name, tensor in tensors.items())
        assert all(actual[name].dtype == tensor.dtype for name, tensor in tensors.items())

    def test_strides_round_trip(self):
        """Channels-last strides are restored, gaps are removed."""
        last = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
        gaps = torch.rand(4, 6)[:, ::2]

        read = round_trip({"last": last, "gaps": gaps, "turned": torch.rand(2, 3).t()})

        assert torch.equal(read["last"], last)
        assert read["last"].stride() == last.stride()
        assert torch.equal(read["gaps"], gaps)
        assert read["gaps"].is_contiguous()
        assert read["turned"].stride() == (1, 3)

    @pytest.mark.parametrize("copy", [True, False])
    def test_copy(self, copy):
        """Later changes of the run do not change a copy; without one, the tensor's own memory is written."""
        weight = torch.zeros(2)

        _, pieces = pack({"weight": weight}, copy=copy)
        weight += 1

        assert bytes(pieces[1]) == bytes(8) if copy else bytes(weight.numpy())

    def test_tied_weights_have_both_names(self):
        """Two names of one memory are both written."""
        layer = nn.Linear(2, 2)

        read = load(write({"one": layer.weight, "two": layer.weight}))

        assert torch.equal(read["one"], layer.weight)
        assert torch.equal(read["two"], layer.weight)

    @pytest.mark.gpu
    def test_copies_of_cuda_tensors_are_pinned(self):
        """Tensors on a CUDA device are copied to pinned memory."""
        memory = {}
        content = write({"weight": torch.arange(5.0, device="cuda")}, memory=memory)

        assert memory[MODEL, "weight"].is_pinned()
        assert load(content)["weight"].tolist() == [0, 1, 2, 3, 4]


def grid(shape, cuts):
    """Return the parts of a tensor that is cut at places of each dimension."""
    parts = [Region((), ())]
    for whole, places in zip(shape, cuts, strict=True):
        edges = [0, *sorted({place % whole for place in places} - {0}), whole]
        parts = [
            Region((*offset, start), (*size, end - start))
            for offset, size in parts
            for start, end in itertools.pairwise(edges)
        ]
    return parts


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3)
GRIDS = SHAPES.flatmap(
    lambda shape: st.tuples(
        st.just(tuple(shape)), st.tuples(*(st.lists(st.integers(0, 9), max_size=2) for _ in shape)).map(list)
    )
)


def written(layout, writes, described, tensors):
    """Return the layout with checksums, the records, and the bytes of each file, after a header of seven bytes."""
    contents = {}
    for parts, files in zip(described, writes, strict=True):
        for file, names in files.items():
            body = b"".join(tensors[name][parts[MODEL][name][1].slices].numpy().tobytes() for name in names)
            contents[file] = b"_header" + body
    parts = {file: Content([memoryview(content)]) for file, content in contents.items()}
    contents = {file: b"".join(part) for file, part in parts.items()}
    records = {file: part.record for file, part in parts.items()}
    files = {file: TensorFile(7, parts[file].blocks) for file in layout.files}
    return attrs.evolve(layout, files=files), records, contents


@attrs.frozen
class InMemory(LocalFolder):
    """A folder whose files are in memory."""

    contents: dict[str, bytes]

    @contextlib.contextmanager
    def reader(self, name, file):
        """Open a file for reading."""
        yield io.BytesIO(self.contents[file])


def opened(layout, records, contents):
    """Return the checkpoint with these files, and with this layout."""
    content = Content([memoryview(layout.to_bytes(layout.files))])
    contents = {**contents, LAYOUT: b"".join(content)}
    manifest = Manifest(files={**records, LAYOUT: content.record}, timestamp=Timestamp())
    return OpenCheckpoint(InMemory(Path("path"), contents), "one", manifest)


@pytest.fixture
def small_blocks(monkeypatch):
    """Give the checksums of files to blocks of 32 bytes, so that small tensors have many."""
    for module in (manifest, reading):
        monkeypatch.setattr(module, "BLOCK_BYTES", 32)
    monkeypatch.setattr(reading, "_READ_BYTES", 5)


def read_part(part, layout, records, contents):
    """Return a part of the weight, read from the files that have elements of it."""
    target = torch.full(part.shape, -1)
    for cell in layout.tensors[MODEL]["weight"].cells(part) if target.numel() else ():
        name = [*layout.files][cell.file]
        with InMemory(Path("path"), contents).reader("one", name) as read:
            blocks = reading._Blocks(read, layout.files[name], records[name].size, name)
            reading._read_cell(blocks, target, part, cell)
            blocks.finish()
    return target


def described_as(parts, shape, dtype="int64"):
    """Return what each process with one of these parts describes."""
    return [{MODEL: {"weight": (TensorInfo(dtype, shape, None, (0,)), part)}} for part in parts]


@pytest.mark.usefixtures("small_blocks")
class TestReadParts:
    @given(GRIDS, st.integers(1, 3))
    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_law(self, case, replicas):
        """Each part of any grid is written once, and the parts make the tensor again."""
        shape, cuts = case
        tensor = torch.arange(math.prod(shape)).view(shape)
        parts = grid(shape, cuts) * replicas
        described = described_as(parts, shape)
        layout, writes = plan_files(described)
        layout, records, contents = written(layout, writes, described, {"weight": tensor})

        found = opened(layout, records, contents).tensors(MODEL)["weight"]

        assert len(layout.files) == len(parts) // replicas
        assert layout == Layout.from_bytes(layout.to_bytes(layout.files), "layout.json")
        assert torch.equal(found, tensor)

    @given(GRIDS, st.data())
    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_part_of_any_grid(self, case, data):
        """A process that has any box of a tensor reads exactly its elements, from exactly the blocks that have them."""
        shape, cuts = case
        tensor = torch.arange(math.prod(shape)).view(shape)
        described = described_as(grid(shape, cuts), shape)
        layout, records, contents = written(*plan_files(described), described, {"weight": tensor})
        bounds = [sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2))) for length in shape]
        part = Region(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))

        target = read_part(part, layout, records, contents)

        assert torch.equal(target, tensor[part.slices])

    def test_only_own_blocks_are_read(self):
        """Damage in a block without an element of this process is not noticed, in one with elements it is named."""
        described = described_as([Region((0,), (64,))], (64,))
        layout, records, contents = written(*plan_files(described), described, {"weight": torch.arange(64)})
        [(name, content)] = contents.items()
        damaged = bytearray(content)
        damaged[10 * 32] ^= 1

        for part, is_damaged in (Region((0,), (30,)), False), (Region((30,), (20,)), True):
            expected = pytest.raises(CheckpointError, match="xxh3_128 of its block 10 is not")
            with expected if is_damaged else contextlib.nullcontext():
                read_part(part, layout, records, {name: damaged})


def test_model_that_is_not_sharded(runs, saved):
    """Without DTensors in the run, every tensor is read completely."""
    opened = open_checkpoint(saved)

    likes = sharded_like(opened, runs.make().get_model_state_dict(), opened.data())

    assert likes.keys() == opened.layout.tensors.keys()
    assert not any(likes.values())


def test_references():
    """Only a dictionary with the name of a tensor is one; the keys that lead to it are those of dictionaries."""
    data = {"0": [{"weight": {"$tensor": "a"}}], "1": {"$tensor": 1}, "2": {"tensor": "weight"}, "3": None}

    assert references(data) == {"a": ["0", "weight"]}

"""Checkpoints of sharded models: saved on one mesh, loaded on any other, equal bit for bit."""

import contextlib
import itertools
import json
import math
import re

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from composer.checkpoint import (
    CheckpointError,
    Manifest,
    diff_checkpoints,
    find_checkpoints,
    manifest,
    sharded,
    show_checkpoint,
)
from composer.checkpoint.manifest import PartContent
from composer.checkpoint.sharded import Layout, PartFile, TensorLayout, own_parts, pack_parts, plan_parts, read_parts
from composer.core import Timestamp

FAULTS = ["flipped", "cut", "swapped", "missing", "of another save", "layout.json", "state.json"]
MESHES = {
    "1": 1,
    "2": 2,
    "4": 4,
    "2x2": 4,
    "4, second dimension": 4,
    "2x2, second dimension": 4,
    "2, tp": 2,
    "4, tp": 4,
    "2x2, tp": 4,
    "3x2, tp": 6,
}
"""The number of processes in each mesh."""

LOSES_SPLIT = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.8",
    reason="operations of torch 2.7 lose how FSDP2 has split the parts of tensor parallelism (_StridedShard)",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_program):
    """The folder of the program, which takes more than 5 seconds: it starts groups of up to six processes."""
    path = tmp_path_factory.mktemp("sharded")
    run_program("sharded_program.py", path)
    return path


def results(folder, step):
    """Return what each process has written in a step."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{step}*.json"))]


class TestMeshes:
    @pytest.mark.parametrize("mesh", MESHES)
    @pytest.mark.parametrize("saved", [*MESHES, "plain"])
    def test_any_to_any(self, folder, saved, mesh):
        """Weights, optimizer and averages are those that were saved, on every rank."""
        found = [result[f"{saved} -> {mesh}"] for result in results(folder, "load-") if f"{saved} -> {mesh}" in result]
        assert found == [[]] * MESHES[mesh]

    def test_only_own_parts_of_complete_tensors_are_kept(self, folder):
        """Of a checkpoint of one process, each process keeps its parts of weights and of the optimizer's state."""
        found = [result["complete"] for result in results(folder, "load-")]
        assert found == [[]] * 13

    @pytest.mark.parametrize("saved", MESHES)
    def test_without_sharding(self, folder, saved):
        """One process without sharding loads the complete tensors."""
        assert results(folder, "alone")[0][saved] == []

    def test_replicas_share_the_work(self, folder):
        """Of two replicas, each writes parts of the weights, and none is written twice."""
        layout = json.loads((folder / "checkpoints/2x2/layout.json").read_text())
        weights = layout["tensors"]["model.safetensors"]
        assert len({file for one in weights.values() for file in one["files"]}) > 2
        assert [len(weights[name]["files"]) for name in ("even.weight", "mean")] == [2, 1]

    def test_merged_file(self, folder):
        """The merged file of safetensors has the weights of the run that was not sharded."""
        expected = load_file(folder / "checkpoints/plain/model.safetensors")
        torch.testing.assert_close(load_file(folder / "merged.safetensors"), expected, rtol=0, atol=0)

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_read_by_pytorch(self, folder):
        """PyTorch's reader for safetensors finds the complete weights in the parts."""
        storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage", reason="torch 2.7 has no such reader")
        if not hasattr(storage, "HuggingFaceStorageReader"):
            pytest.skip("this torch has no public HuggingFaceStorageReader")
        expected = load_file(folder / "checkpoints/plain/model.safetensors")
        loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        reader = storage.HuggingFaceStorageReader(str(folder / "checkpoints/4"))
        torch.distributed.checkpoint.load(loaded, storage_reader=reader, no_dist=True)
        torch.testing.assert_close(loaded, expected, rtol=0, atol=0)


class TestInspection:
    def test_is_found_and_shown(self, folder):
        """It is found like any other, and shown with its weights and files."""
        assert all(found.is_whole for found in find_checkpoints(folder / "checkpoints") if found.name not in FAULTS)
        text = show_checkpoint(folder / "checkpoints/4")
        assert "weights     196 numbers" in text
        assert "model-00004-of-00004.safetensors" in text

    def test_same_run_on_another_mesh(self, folder):
        """Two checkpoints of one run on other meshes do not differ."""
        assert diff_checkpoints(folder / "checkpoints/2", folder / "checkpoints/2x2") == []


class TestFailures:
    def test_one_process_cannot_save(self, folder):
        """All processes raise an error, the others with the rank and its error, and nothing is left."""
        first, second = results(folder, "fail-")
        assert second["errors"]["saving"].startswith("NotSerializableError: optimizers.AdamW.param_groups[0].lr")
        assert "failed in process 1: NotSerializableError: optimizers.AdamW" in first["errors"]["saving"]
        assert (first["left"], second["left"]) == ([], [])

    @pytest.mark.parametrize(
        ("fault", "part", "problem"),
        [
            ("flipped", "model-00003", "has been changed since it was written: the xxh3_128 of its block 0 is not"),
            ("cut", "model-00003", "bytes, and the manifest lists"),
            ("swapped", "optimizers-0000[23]", "has been changed since it was written"),
            ("missing", "model-00003", "is missing, and the manifest lists it"),
            ("of another save", "model-00004", "has been changed since it was written"),
            ("layout.json", "layout.json", "(has been changed since it was written|bytes, and the manifest lists)"),
            ("state.json", "state.json", "(has been changed since it was written|bytes, and the manifest lists)"),
        ],
    )
    def test_a_fault(self, folder, fault, part, problem):
        """Each process refuses the checkpoint in one sentence that names the part, and nothing has changed."""
        part = part if part.endswith(".json") else f"{part}-of-00004.safetensors"
        for result in results(folder, "fail-"):
            assert re.search(f"{part} [^.]*{problem}", result["errors"][fault])
            assert "\n" not in result["errors"][fault]
            assert result["changed"][fault] == []

    def test_a_process_that_has_not_read_the_fault(self, folder):
        """It names the process that has, and the checkpoint."""
        first, second = (result["errors"]["flipped"] for result in results(folder, "fail-"))
        assert second.startswith(f"{folder}/checkpoints/flipped/model-00003")
        assert first.startswith(f"{folder}/checkpoints/flipped was not loaded, and nothing has been changed: it failed")
        assert second.rstrip(".") in first

    def test_state_of_an_optimizer_that_is_no_dtensor(self, folder):
        """It is not saved as the first process has it: it would be lost in the others."""
        for result in results(folder, "fail-"):
            assert result["errors"]["local"].startswith("NotSerializableError: optimizers.AdamW.state.")
            assert ".exp_avg: a tensor of shape [" in result["errors"]["local"]
            assert "is the part of this process, and no DTensor" in result["errors"]["local"]

    def test_replaced_while_it_is_read(self, folder):
        """If the processes have read two checkpoints, none is loaded."""
        error = f"{folder}/checkpoints/4 was not loaded, and nothing has been changed: it was replaced by another"
        for result in results(folder, "fail-"):
            assert result["errors"]["replaced"].startswith(error)
            assert result["changed"]["replaced"] == []

    def test_newest_undamaged_one(self, folder):
        """All processes choose the same one, after each has compared its share of the parts with the checksums."""
        found = [result["newest"] for result in results(folder, "fail-")]
        assert [one["path"] for one in found] == [f"{folder}/newest/4"] * 2
        for one in found:
            [first, second] = one["warnings"]
            assert "newest/of-another-save/model-00004-of-00004.safetensors has been changed" in first
            assert "newest/flipped/model-00003-of-00004.safetensors has been changed" in second
        names = ["model", "optimizers", "extra"]
        parts = sorted(f"4/{name}-0000{place}-of-00004.safetensors" for name in names for place in (1, 2, 3, 4))
        first, second = ([file for file in one["checked"] if file.startswith("4/")] for one in found)
        assert sorted(first + second) == [file for file in parts if (folder / "newest" / file).exists()]
        assert abs(len(first) - len(second)) <= 1

    def test_a_part_is_missing_at_the_timeout(self, folder):
        """All processes raise an error that names the late one, nothing is left, and the next save succeeds."""
        error = "process 1 has not answered in 0.5 seconds; is it still running?"
        for result in results(folder, "late-"):
            assert result == {"error": f"The checkpoint {folder}/late/one was not saved: {error}", "left": []}

    def test_one_process_cannot_load(self, folder):
        """If one process cannot load what was read, all raise an error, the others with its rank and its error."""
        first, second = (result["errors"]["loading"] for result in results(folder, "fail-"))
        assert "refused" in second
        assert first == f"RuntimeError: Loading a checkpoint failed in process 1: {second}"


class TestRemote:
    def test_round_trip(self, folder):
        """Through fsspec, each process uploads its parts and reads ranges of them; the manifest is the last file."""
        for result in results(folder, "remote-"):
            assert result["differences"] == []
            assert result["names"] == ["one"]

    def test_only_own_bytes_are_read(self, folder):
        """Of the bytes of all parts, each process reads less than a third: headers and the parts of others are not."""
        for result in results(folder, "remote-"):
            assert 0.1 < result["read"] < 0.33

    def test_one_process_fails(self, folder):
        """If one process cannot upload, all raise an error, and there is no checkpoint."""
        first, second = (result["error"] for result in results(folder, "remote-"))
        assert "sharedfile:" in first
        assert "process 1 failed: ValueError: refused" in first
        assert second == "ValueError: refused"

    def test_a_folder_of_each_process(self, folder):
        """If the first process does not find the others' parts, all raise an error that names the cause."""
        for result in results(folder, "remote-"):
            assert "00002-of-00002.safetensors' is missing in the folder of the first" in result["not shared"]
            assert "the folder must be the same for all processes, which memory:// and" in result["not shared"]


class TestOtherState:
    @pytest.mark.parametrize("mesh", ["1", "2", "4"])
    @pytest.mark.parametrize("name", ["EMA", "SWA", "SAM", "LayerFreezing"])
    def test_any_mesh(self, folder, name, mesh):
        """What an algorithm saves of a run of two processes is loaded with equal bits in any number of them."""
        saved = results(folder, "trained-")[0][name]
        found = [result[name] for result in results(folder, f"others-{mesh}")]
        assert len(saved) > 10
        assert found == [saved] * int(mesh)


class TestKinds:
    @pytest.mark.parametrize("moment", ["later", "before"])
    @pytest.mark.parametrize(
        ("name", "processes"),
        [
            ("fsdp", 12),
            pytest.param("fsdp and tp", 4, marks=LOSES_SPLIT),
            pytest.param("uneven", 6, marks=LOSES_SPLIT),
        ],
    )
    def test_other_shapes(self, folder, name, processes, moment):
        """An optimizer whose state has another shape than its weight trains on with equal bits, on any mesh.

        The checkpoint is loaded before the model is sharded, as by the Trainer, or later.
        """
        found = results(folder, "kinds-")
        [end, *_] = [result[f"{name}, saved"]["end"] for result in found if f"{name}, saved" in result]
        assert [result[name][moment] for result in found if name in result] == [end] * processes

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("fsdp", "(Shard(dim=0),)"),
            pytest.param("fsdp and tp", "(_StridedShard(dim=0, sf=2), Shard(dim=0))", marks=LOSES_SPLIT),
            pytest.param("uneven", "(_StridedShard(dim=0, sf=2), Shard(dim=0))", marks=LOSES_SPLIT),
        ],
    )
    def test_placements_of_other_shapes(self, folder, name, kind):
        """Such state is sharded as it was, also where FSDP2 has split the parts of tensor parallelism."""
        found = results(folder, "kinds-")
        assert {result[key]["placements"] for result in found for key in (name, f"{name}, saved") if key in result} == {
            kind
        }

    def test_no_dtensor(self, folder):
        """A tensor that was not sharded is not sharded, even if it has the name and the shape of a weight."""
        assert [result["fsdp"]["held"] for result in results(folder, "kinds-")] == ["Tensor"] * 12

    def test_refused(self, folder):
        """State of another shape is refused on a mesh of other dimensions, and a tensor whose parts are no blocks."""
        for mesh, blocks in (result["refused"] for result in results(folder, "kinds-4")):
            assert "'optimizers.Factored.state.even.weight.moment' has another shape than its weight" in mesh
            assert "was sharded over a mesh of 2 dimensions instead of 1" in mesh
            assert "has parts that are not blocks of it" in blocks

    def test_one_checkpoint(self, folder):
        """All processes load the checkpoint that the first one finds, and raise the same error if there is none."""
        found = results(folder, "kinds-")
        assert [result["paths"] for result in found] == [[]] * 12
        assert all("missing" in result["missing"] for result in found)


class TestMeta:
    def test_initial_weights(self, folder):
        """A model on the meta device has equal initial weights and buffers in any number of processes."""
        found = results(folder, "meta-")
        assert [result["initial"] for result in found] == [found[0]["initial"]] * 7
        assert len(set(found[0]["initial"].values())) == 7  # six parameters and a buffer
        assert sum(result["elements"] for result in results(folder, "meta-4")) == found[0]["elements"]
        assert max(result["elements"] for result in results(folder, "meta-4")) < found[0]["elements"] / 2

    def test_resumes(self, folder):
        """It resumes from a checkpoint of two processes with equal bits in any number, and trains the same."""
        found = results(folder, "meta-")
        assert [result["resumed"] for result in found] == [results(folder, "trained-")[0]["EMA"]] * 7
        assert [result["end"] for result in found] == pytest.approx([found[0]["end"]] * 7, rel=1e-5)


class TestBackground:
    def test_weights_may_change(self, folder):
        """Training goes on while parts are written, and the checkpoint has the weights of the moment of the save."""
        for result in results(folder, "background-"):
            assert result["goes on"]
            assert result["loaded"] == []

    def test_one_process_fails(self, folder):
        """All processes raise the error at the next save, and no checkpoint is left; the one after it is written."""
        first, second = (result["error"] for result in results(folder, "background-"))
        path = f"{folder}/background/2"
        assert first == (
            f"CheckpointSaveError: The checkpoint {path} was not saved: process 1 failed: OSError: [Errno 28] No space "
            "left on device."
        )
        assert second == "OSError: [Errno 28] No space left on device"
        assert results(folder, "background-")[0]["left"] == [".lock", "1", "3", "4", "latest"]

    def test_one_process_fails_after_writing(self, folder):
        """An error of one process whose parts have been written is raised in all, and all can repeat the save."""
        first, second = results(folder, "background-")
        assert second["error after writing"] == "MemoryError: too little"
        assert "failed in process 1: MemoryError: too little" in first["error after writing"]
        assert first["can be repeated"]
        assert second["can be repeated"]

    def test_process_groups_are_not_used(self, folder):
        """The threads call no collectives, which could meet those of the training."""
        for result in results(folder, "background-"):
            assert result["collectives"]["others"] == []
            assert {"all_gather_object", "all_reduce"} <= set(result["collectives"]["main"])


def grid(shape, cuts):
    """Return the parts of a tensor that is cut at places of each dimension."""
    parts = [((), ())]
    for whole, places in zip(shape, cuts, strict=True):
        edges = [0, *sorted({place % whole for place in places} - {0}), whole]
        parts = [
            ((*offset, start), (*size, end - start))
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
    """Return the layout with checksums, the manifest, and the bytes of each file, after a header of seven bytes."""
    contents = {}
    for parts, files in zip(described, writes, strict=True):
        for file, names in files.items():
            body = b"".join(
                tensors[name][place_of(parts["model.safetensors"][name][1])].numpy().tobytes() for name in names
            )
            contents[file] = b"_header" + body
    parts = {file: PartContent([memoryview(content)]) for file, content in contents.items()}
    contents = {file: b"".join(part) for file, part in parts.items()}
    records = {file: part.record for file, part in parts.items()}
    files = {file: PartFile(7, parts[file].blocks) for file in layout.files}
    return attrs.evolve(layout, files=files), Manifest(files=records, timestamp=Timestamp()), contents


def place_of(part):
    return tuple(slice(start, start + length) for start, length in zip(*part, strict=True))


def opener(contents):
    """Return what opens a file of these contents for reading."""

    @contextlib.contextmanager
    def open_file(name):
        def read(position, memory):
            memory[:] = contents[name][position : position + len(memory)]

        yield read

    return open_file


@pytest.fixture
def small_blocks(monkeypatch):
    """Give the checksums of files to blocks of 32 bytes, so that small tensors have many, and read few at once."""
    for module in (sharded, manifest):
        monkeypatch.setattr(module, "BLOCK_BYTES", 32)
    monkeypatch.setattr(sharded, "_DIRECT_BYTES", 16)
    monkeypatch.setattr(sharded, "_READ_BYTES", 5)


def read_part(part, layout, records, contents):
    """Return a part of the weight, read from the files that have elements of it."""
    target = torch.full(part[1], -1)
    for name, file in layout.files.items():
        ranges = [
            sharded._range_of(target, part, position, cell)
            for number, position, cell in layout.tensors["model.safetensors"]["weight"].cells(part)
            if [*layout.files][number] == name and target.numel()
        ]
        if ranges:
            with opener(contents)(name) as read:
                sharded._read_blocks(read, ranges, file, records.files[name].size, name)
    return target


def described_as(parts, shape, dtype="int64"):
    """Return what each process with one of these parts describes."""
    return [{"model.safetensors": {"weight": ((dtype, shape, None, (0,)), part)}} for part in parts]


@pytest.mark.usefixtures("small_blocks")
class TestPlans:
    @given(GRIDS, st.integers(1, 3))
    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_law(self, case, replicas):
        """Each part of any grid is written once, and the parts make the tensor again."""
        shape, cuts = case
        tensor = torch.arange(math.prod(shape)).view(shape)
        parts = grid(shape, cuts) * replicas
        described = described_as(parts, shape)
        layout, writes = plan_parts(described)
        layout, records, contents = written(layout, writes, described, {"weight": tensor})

        found = read_parts(layout, "model.safetensors", records, opener(contents), "path")["weight"]

        assert len(layout.files) == len(parts) // replicas
        assert layout == Layout.from_bytes(layout.to_bytes(), "layout.json")
        assert torch.equal(found, tensor)

    @given(GRIDS, st.data())
    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_part_of_any_grid(self, case, data):
        """A process that has any box of a tensor reads exactly its elements, from exactly the blocks that have them."""
        shape, cuts = case
        tensor = torch.arange(math.prod(shape)).view(shape)
        described = described_as(grid(shape, cuts), shape)
        layout, records, contents = written(*plan_parts(described), described, {"weight": tensor})
        bounds = [sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2))) for length in shape]
        part = tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds)

        target = read_part(part, layout, records, contents)

        assert torch.equal(target, tensor[place_of(part)])

    def test_part_of_the_size_of_a_cell(self):
        """A part that begins within a cell and has its size is read from this cell and the next."""
        described = described_as([((0,), (4,)), ((4,), (4,))], (8,))
        layout, records, contents = written(*plan_parts(described), described, {"weight": torch.arange(8)})

        target = read_part(((2,), (4,)), layout, records, contents)

        assert target.tolist() == [2, 3, 4, 5]

    def test_only_own_blocks_are_read(self):
        """Damage in a block without an element of this process is not noticed, in one with elements it is named."""
        described = described_as([((0,), (64,))], (64,))
        layout, _, contents = written(*plan_parts(described), described, {"weight": torch.arange(64)})
        [(name, content)] = contents.items()
        damaged = bytearray(content)
        damaged[10 * 32] ^= 1
        one = layout.tensors["model.safetensors"]["weight"]

        for part, is_damaged in (((0,), (30,)), False), (((30,), (20,)), True):
            target = torch.empty(part[1], dtype=torch.int64)
            ranges = [sharded._range_of(target, part, position, cell) for _, position, cell in one.cells(part)]
            expected = pytest.raises(CheckpointError, match="xxh3_128 of its block 10 is not")
            with expected if is_damaged else contextlib.nullcontext(), opener({name: damaged})(name) as read:
                sharded._read_blocks(read, ranges, layout.files[name], len(damaged), name)

    @pytest.mark.parametrize(
        ("begins", "sizes"), [((0, 0), (24, 24)), ((0, 8), (32, 8)), ((4, 8), (4, 20)), ((3,), (29,))]
    )
    def test_memory_of_several_ranges(self, begins, sizes):
        """Each range gets its bytes, also from a layout whose tensors share some."""
        content = PartContent([memoryview(bytes(range(32)))])
        file = b"".join(content)
        memories = [bytearray(size) for size in sizes]
        ranges = [sharded._Range(begin, memoryview(one)) for begin, one in zip(begins, memories, strict=True)]

        with opener({"a": file})("a") as read:
            sharded._read_blocks(read, ranges, PartFile(0, content.blocks), 32, "a")

        assert memories == [file[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]

    def test_places_are_those_of_the_files(self):
        """The planned bytes of each part are those of the file that is written."""
        tensors = {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(5, dtype=torch.int8)}
        of_kind = {"model.safetensors": tensors}
        described = own_parts(of_kind, is_first=True)
        layout, [writes] = plan_parts([described])

        [packed] = pack_parts(of_kind, described, writes, copy=True).values()

        header = json.loads(bytes(packed.pieces[0][8:]))
        places = {name: one.positions[0] for name, one in layout.tensors["model.safetensors"].items()}
        assert places == {name: header[name]["data_offsets"][0] for name in tensors} == {"a": 16, "b": 0, "c": 28}

    def test_strides(self):
        """A tensor that is not sharded, dense and in another memory format has its strides again."""
        tensor = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
        of_kind = {"model.safetensors": {"weight": tensor}}
        described = [own_parts(of_kind, is_first=True)]
        layout, records, contents = written(*plan_parts(described), described, of_kind["model.safetensors"])

        found = read_parts(layout, "model.safetensors", records, opener(contents), "path")["weight"]

        assert torch.equal(found, tensor)
        assert found.stride() == tensor.stride()

    def test_replicas_are_balanced(self):
        """Of eight equal tensors in four replicas, each process writes two."""
        look = ("float32", (4,), None, None)
        one = {"model.safetensors": {f"w{place}": (look, ((0,), (4,))) for place in range(8)}}
        _, writes = plan_parts([one] * 4)
        assert [len(names) for files in writes for names in files.values()] == [2, 2, 2, 2]

    def test_other_models(self):
        """A tensor of another shape in one process is refused by its name."""
        described = [described_as([((0,), (size,))], (size,), "float32")[0] for size in (4, 5)]
        with pytest.raises(ValueError, match=r"'weight' is float32\[5\] in process 1"):
            plan_parts(described)

    @pytest.mark.parametrize(
        "parts",
        [[((0,), (2,))], [((0,), (3,)), ((2,), (2,))], [((0,), (2,)), ((3,), (1,))], [((2,), (2,))]],
    )
    def test_parts_that_do_not_fill_a_tensor(self, parts):
        """Gaps and overlaps are refused by the name of the tensor."""
        with pytest.raises(ValueError, match="'weight' in the processes do not fill its shape"):
            plan_parts(described_as(parts, (4,)))

    def test_large_models(self):
        """The layout of 10,000 tensors in 64 processes has less than 20 MB, and each process finds its parts."""
        layout = large_layout(tensors=10_000, processes=64)

        content = layout.to_bytes()
        read = Layout.from_bytes(content, "layout.json")
        own = [[*one.cells(((64, 0), (64, 4096)))] for one in read.tensors["model.safetensors"].values()]

        assert len(content) < 20_000_000
        assert all(len(cells) == 1 and cells[0][0] == 1 for cells in own)


def large_layout(tensors, processes):
    """Return the layout of matrices of 64 rows in each process, with all of their checksums."""
    size = 64 * 4096 * 4
    cuts = [[64 * rank for rank in range(processes)], [0]]
    of_kind = {
        f"model.layers.{place // 10}.block.linear{place % 10}.weight": TensorLayout(
            "float32", [64 * processes, 4096], cuts, [*range(processes)], [place * size] * processes
        )
        for place in range(tensors)
    }
    blocks = "0123456789abcdef" * 2 * (tensors * size // (4 << 20))
    files = {
        f"model-{place:05}-of-{processes:05}.safetensors": PartFile(1000, blocks) for place in range(1, processes + 1)
    }
    return Layout(files, {"model.safetensors": of_kind})


GOOD = {"dtype": "float32", "shape": [4], "cuts": [[0, 2]], "files": [0, 0], "positions": [0, 8]}


class TestLayout:
    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"cuts": [[0, 4]]}, "do not fill"),
            ({"cuts": [[1, 2]]}, "do not fill"),
            ({"cuts": [[2, 0]]}, "do not fill"),
            ({"cuts": [[0, 2], [0]]}, "do not fill"),
            ({"cuts": 5}, "lists of numbers"),
            ({"files": [0]}, "do not fill"),
            ({"files": [0, True]}, "lists of numbers"),
            ({"files": [0, 1]}, "in a file that does not exist"),
            ({"positions": [0, -8]}, "lists of numbers"),
            ({"shape": [4.0]}, "lists of numbers"),
            ({"dtype": "float33"}, "no dtype 'float33'"),
            ({"dtype": ["float32"]}, "no dtype"),
            ({"strides": [1]}, "strides"),
            ({"is_plain": 1.5}, "is_plain"),
            ({"placements": [1]}, "placements"),
            ({"placements": "0"}, "placements"),
            ({"other": 1}, "other"),
        ],
    )
    def test_a_tensor_that_is_not_whole(self, change, problem):
        """A tensor whose parts do not fill it, or with other values, is refused."""
        tensors = {"model.safetensors": {"w": GOOD | change}}
        files = {"model-00001-of-00001.safetensors": {"begin": 8, "blocks": ""}}
        with pytest.raises(CheckpointError, match=rf"layout.json is not the layout of a checkpoint: .*{problem}"):
            Layout.from_bytes(json.dumps({"files": files, "tensors": tensors}).encode(), "layout.json")

    @pytest.mark.parametrize("content", [{}, {"files": [], "tensors": {}}, {"files": {"a": 1}, "tensors": {}}])
    def test_other_content(self, content):
        """JSON of another form is refused."""
        with pytest.raises(CheckpointError, match="is not the layout of a checkpoint"):
            Layout.from_bytes(json.dumps(content).encode(), "layout.json")

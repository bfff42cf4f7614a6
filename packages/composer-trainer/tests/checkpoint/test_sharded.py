"""Checkpoints of sharded models: saved on one mesh, loaded on any other, equal bit for bit."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from composer.checkpoint import CheckpointError, diff_checkpoints, find_checkpoints, show_checkpoint
from composer.checkpoint.sharded import Layout, TensorLayout, assemble, plan_parts

MESHES = ["1", "2", "4", "2x2", "4, second dimension"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_program):
    """The folder of the program, which takes more than 5 seconds: it starts six groups of up to four processes."""
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
        assert found == [[]] * math.prod({"2x2": (4,)}.get(mesh, (int(mesh[0]),)))

    @pytest.mark.parametrize("saved", MESHES)
    def test_without_sharding(self, folder, saved):
        """One process without sharding loads the complete tensors."""
        assert results(folder, "alone")[0][saved] == []

    def test_replicas_share_the_work(self, folder):
        """Of two replicas, each writes parts of the weights, and none is written twice."""
        layout = json.loads((folder / "checkpoints/2x2/layout.json").read_text())
        weights = layout["tensors"]["model.safetensors"]
        assert len({chunk[0] for one in weights.values() for chunk in one["chunks"]}) > 2
        assert [len(weights[name]["chunks"]) for name in ("even.weight", "mean")] == [2, 1]

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
        assert all(found.is_whole for found in find_checkpoints(folder / "checkpoints") if found.name != "damaged")
        text = show_checkpoint(folder / "checkpoints/4")
        assert "weights     172 numbers" in text
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

    def test_a_flipped_bit(self, folder):
        """Each process refuses the checkpoint by the name of the part, and nothing has changed."""
        for result in results(folder, "fail-"):
            assert "model-00003-of-00004.safetensors has been changed" in result["errors"]["loading"]
            assert result["changed"] == []


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


class TestPlans:
    @given(GRIDS, st.integers(1, 3))
    @settings(deadline=None)
    def test_law(self, case, replicas):
        """Each part of any grid is written once, and the parts make the tensor again."""
        shape, cuts = case
        tensor = torch.arange(math.prod(shape)).view(shape)
        parts = grid(shape, cuts) * replicas
        described = [{"model.safetensors": {"weight": ("int64", shape, part)}} for part in parts]
        layout, writes = plan_parts(described)

        def read(file):
            [rank] = [rank for rank, files in enumerate(writes) if file in files]
            offset, size = parts[rank]
            place = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
            return {"weight": tensor[place]}

        assert len(layout.files) == len(parts) // replicas
        assert layout == Layout.from_bytes(layout.to_bytes(), "layout.json")
        assert torch.equal(assemble(layout, "model.safetensors", read, "path")["weight"], tensor)

    def test_replicas_are_balanced(self):
        """Of eight equal tensors in four replicas, each process writes two."""
        one = {"model.safetensors": {f"w{place}": ("float32", (4,), ((0,), (4,))) for place in range(8)}}
        _, writes = plan_parts([one] * 4)
        assert [len(names) for files in writes for names in files.values()] == [2, 2, 2, 2]

    def test_other_models(self):
        """A tensor of another shape in one process is refused by its name."""
        described = [{"model.safetensors": {"w": ("float32", (size,), ((0,), (size,)))}} for size in (4, 5)]
        with pytest.raises(ValueError, match=r"'w' is float32\[5\] in process 1"):
            plan_parts(described)

    @pytest.mark.parametrize(
        ("chunks", "problem"),
        [
            ([(0, [0], [2])], "do not fill"),
            ([(0, [0], [3]), (0, [2], [1])], "do not fill"),
            ([(0, [0], [2]), (0, [0], [2])], "do not fill"),
            ([(0, [2], [4])], "is not within"),
            ([(0, [0, 0], [4, 1])], "is not within"),
            ([(0, [-1], [4])], "is not within"),
        ],
    )
    def test_parts_that_do_not_fill_a_tensor(self, chunks, problem):
        """Gaps, overlaps and parts outside of the tensor are refused."""
        with pytest.raises(ValueError, match=problem):
            TensorLayout("float32", [4], chunks)

    def test_a_file_that_does_not_exist(self):
        """A part in a file that is not listed is refused."""
        tensors = {"model.safetensors": {"w": {"dtype": "float32", "shape": [1], "chunks": [[1, [0], [1]]]}}}
        content = json.dumps({"files": ["model-00001-of-00001.safetensors"], "tensors": tensors}).encode()
        with pytest.raises(CheckpointError, match="has a part in a file that does not exist"):
            Layout.from_bytes(content, "layout.json")

    @pytest.mark.parametrize("content", [{}, {"w": torch.zeros(3)}, {"w": torch.zeros(2).double()}])
    def test_other_content(self, content):
        """A file with other tensors than the layout lists is refused by its name."""
        layout, _ = plan_parts([{"model.safetensors": {"w": ("float32", (2,), ((0,), (2,)))}}])
        with pytest.raises(CheckpointError, match=r"path/model-00001-of-00001.safetensors has (other tensors|another)"):
            assemble(layout, "model.safetensors", lambda _: content, "path")

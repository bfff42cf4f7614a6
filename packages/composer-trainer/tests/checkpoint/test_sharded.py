"""Checkpoints of sharded models: saved on one mesh, loaded on any other, equal bit for bit."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from composer.checkpoint import find_checkpoints, show_checkpoint

FAULTS = ["flipped", "cut", "swapped", "missing", "of another save", "layout.json", "state.json"]
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


@pytest.mark.slow
class TestMeshes:
    def test_any_to_any(self, folder):
        """Weights, optimizer and averages are those that were saved, on every rank of each of ten meshes."""
        found = [(name, one) for result in results(folder, "load-") for name, one in result.items() if "->" in name]
        assert [(name, one) for name, one in found if one] == []
        assert len(found) == 11 * (1 + 2 * 2 + 6 * 4 + 6)

    def test_only_own_parts_of_complete_tensors_are_kept(self, folder):
        """Of a checkpoint of one process, each process keeps its parts of weights and of the optimizer's state."""
        found = [result["complete"] for result in results(folder, "load-")]
        assert found == [[]] * 13

    def test_weights_alone_are_the_averages(self, folder):
        """Weights that are loaded alone are those for evaluation, on every mesh."""
        assert [result["weights"] for result in results(folder, "load-")] == [[]] * 13

    def test_without_sharding(self, folder):
        """One process without sharding loads the complete tensors of each mesh."""
        assert list(results(folder, "alone")[0].values()) == [[]] * 10

    def test_one_replica_writes(self, folder):
        """Of two replicas, the two processes of the first write the weights, and no part is written twice."""
        layout = json.loads((folder / "checkpoints/2x2/layout.json").read_text())
        weights = layout["tensors"]["model.safetensors"]
        assert len({file for one in weights.values() for file in one["files"]}) == 2
        assert [len(weights[name]["files"]) for name in ("even.weight", "mean")] == [2, 1]

    def test_merged_file(self, folder):
        """The merged file of safetensors has the weights of the run that was not sharded."""
        expected = load_file(folder / "checkpoints/plain/model.safetensors")
        torch.testing.assert_close(load_file(folder / "merged.safetensors"), expected, rtol=0, atol=0)


class TestInspection:
    def test_is_found_and_shown(self, folder):
        """It is found like any other, and shown with its files."""
        assert all(found.is_complete for found in find_checkpoints(folder / "checkpoints") if found.name not in FAULTS)
        text = show_checkpoint(folder / "checkpoints/4")
        assert "model-00004-of-00004.safetensors" in text


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
        """Each process rejects the checkpoint in one sentence that names the part, and none loads it."""
        part = part if part.endswith(".json") else f"{part}-of-00004.safetensors"
        for result in results(folder, "fail-"):
            assert re.search(f"{part} [^.]*{problem}", result["errors"][fault])
            assert "\n" not in result["errors"][fault]
            assert result["changed"][fault] == []

    def test_a_process_that_has_not_read_the_fault(self, folder):
        """It names the process that has, and the checkpoint."""
        first, second = (result["errors"]["flipped"] for result in results(folder, "fail-"))
        assert second.startswith(f"{folder}/checkpoints/flipped/model-00003")
        assert first.startswith(f"{folder}/checkpoints/flipped was not loaded: it failed")
        assert second.rstrip(".") in first

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

    def test_one_process_cannot_load(self, folder):
        """If one process cannot load what was read, all raise an error, the others with its rank and its error."""
        first, second = (result["errors"]["loading"] for result in results(folder, "fail-"))
        assert "rejected" in second
        assert first == f"RuntimeError: Loading a checkpoint failed in process 1: {second}"


class TestRemote:
    def test_round_trip(self, folder):
        """Through fsspec, each process uploads its parts and downloads what it needs; the manifest is the last file."""
        for result in results(folder, "remote-"):
            assert result["differences"] == []
            assert result["names"] == ["one"]

    def test_one_process_fails(self, folder):
        """If one process cannot upload, all raise an error, and there is no checkpoint."""
        first, second = (result["error"] for result in results(folder, "remote-"))
        assert "sharedfile:" in first
        assert "process 1 failed: ValueError: rejected" in first
        assert second == "ValueError: rejected"


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
        """Training continues while parts are written, and the checkpoint has the weights of the moment of the save."""
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
        assert results(folder, "background-")[0]["left"] == [".lock", "1", "3", "latest"]

"""Meshes of data parallelism, FSDP2 and tensor parallelism train as one process does."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from composer import distributed as cd
from composer.checkpoint import load_checkpoint
from composer.core import State
from composer.distributed.process_group import initialize_alone
from composer.models import ComposerClassifier
from fixtures.processes import run_processes

PROGRAM = Path(__file__).with_name("mesh_program.py")
names = runpy.run_path(str(PROGRAM))
PLAN, Network = names["PLAN"], names["Network"]
COUNTS = {"alone": 1, "tp": 2, "replicate": 2, "shard x tp": 4, "replicate x tp": 4, "replicate x shard": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of saved runs and results."""
    return tmp_path_factory.mktemp("meshes")


@pytest.fixture(scope="module")
def results(folder):
    """Return a function that runs a mesh once and returns the results by rank; each takes more than 5 seconds."""
    found = {}

    def run(mesh):
        if mesh not in found:
            count = COUNTS[mesh]
            run_processes(PROGRAM, count, mesh, folder)
            found[mesh] = [json.loads((folder / f"{mesh}-{rank}.json").read_text()) for rank in range(count)]
        return found[mesh]

    return run


def test_trainings_share_their_groups():
    """The groups of a mesh are created once for each default group, as their threads keep running."""
    create = cd.MeshSettings().to_device_mesh
    meshes = []
    for _ in range(2):
        initialize_alone(torch.device("cpu"))
        meshes += [create(torch.device("cpu")), create(torch.device("cpu"))]
        torch.distributed.destroy_process_group()

    assert meshes[0] is meshes[1]
    assert meshes[1] is not meshes[2]
    assert meshes[2] is meshes[3]


CANNOT = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.8",
    reason="torch 2.7 cannot replicate sharded models on CPUs",
)


REPLICATING = [pytest.param(f"replicate x {one}", marks=CANNOT) for one in ("tp", "shard")]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["replicate", "tp", "shard x tp", *REPLICATING])
class TestAnyMesh:
    def test_weights_are_those_of_one_process(self, results, mesh):
        """After six steps with clipping by norm they are equal up to rounding, in each process."""
        [alone] = results("alone")
        for result in results(mesh):
            assert result["train"]["weights"] == pytest.approx(alone["train"]["weights"], rel=1e-10, abs=1e-12)

    def test_each_process_has_a_part(self, results, mesh):
        """The split layers have most of the weights; a replica has all of them."""
        [alone] = results("alone")
        parts = [result["train"]["local"] / alone["train"]["local"] for result in results(mesh)]
        assert max(parts) <= {"replicate": 1.0, "shard x tp": 0.35}.get(mesh, 0.6)

    def test_clock_losses_and_metrics(self, results, mesh):
        """Each sample counts once, whatever number of processes it is in."""
        [alone] = results("alone")
        for result in results(mesh):
            assert result["train"]["clock"] == [6, 44]
            assert result["train"]["losses"] == pytest.approx(alone["train"]["losses"], rel=1e-10)
            assert result["train"]["metrics"] == pytest.approx(alone["train"]["metrics"])
            assert result["train"]["eval"] == pytest.approx(alone["train"]["eval"])


@pytest.mark.parametrize("mesh", ["tp", "shard x tp"])
class TestTensorParallelism:
    def test_compiled_blocks(self, results, mesh):
        """With each block compiled, the weights are those of one process that is not."""
        [alone] = results("alone")
        for result in results(mesh):
            assert result["compiled"]["compiled"] == ["module.blocks.0", "module.blocks.1"]
            assert result["compiled"]["weights"] == pytest.approx(alone["train"]["weights"], rel=1e-10, abs=1e-12)

    def test_group_has_the_same_data_and_draws(self, results, mesh):
        """Both processes of a group get the same samples and random numbers, and other groups get others."""
        seen = [result["train"]["seen"] for result in results(mesh)]
        assert seen[0] == seen[1]
        if mesh == "shard x tp":
            assert seen[2] == seen[3]
            assert all(one != other for one, other in zip(seen[0], seen[2], strict=True))

    def test_resume_is_exact(self, results, mesh):
        """A run with draws that resumes from the middle of an epoch has bit-identical weights and metrics."""
        for result in results(mesh):
            assert result["resumed"]["weights"] == result["draws"]["weights"]
            assert result["resumed"]["metrics"] == result["draws"]["metrics"]

    def test_models_without_data(self, results, mesh):
        """A model on the meta device gets the weights of one process, and resumes with bit-identical ones."""
        [alone] = results("alone")
        for result in results(mesh):
            assert result["initial"] == alone["initial, fsdp"]
            assert result["resumed on meta"]["weights"] == result["draws"]["weights"]

    def test_checkpoint_loads_in_one_process(self, results, folder, mesh):
        """The complete training weights are those of the sharded run, bit for bit."""
        expected = results(mesh)[0]["draws"]["weights"]
        model = ComposerClassifier(Network().double(), num_classes=4)

        path = folder / "saved" / mesh / "ep2-ba6"
        load_checkpoint(path, State(model), weights_only=True, ignore_keys="algorithms/EMA")

        assert [number for weight in model.parameters() for number in weight.flatten().tolist()] == expected


@pytest.mark.parametrize("mesh", ["tp", "shard x tp"])
def test_initial_weights(results, mesh):
    """What reset_parameters() draws, and sets in a module's parts, is equal in 1, 2 and 4 processes."""
    [alone] = results("alone")
    for result in results(mesh):
        assert result["initial, fsdp"] == alone["initial, fsdp"]
    first = alone["initial, fsdp"]
    assert len({tuple(row) for row in first["0.weight"]}) == 6
    assert first["0.norm.weight"] == [3.0] * 4
    assert first["0.up.bias"] == [2.0] * 8


class TestDegreeOfOne:
    """A plan with tp=1, in a single process."""

    @pytest.fixture(autouse=True)
    def closed(self):
        """Processes are disconnected afterwards."""
        yield
        cd.close_dist()

    @pytest.mark.parametrize("fsdp", [{}, {"fsdp": {}}])
    def test_plan_is_not_applied(self, fsdp):
        """The model trains without tensor parallelism, with and without FSDP2."""
        state = State(ComposerClassifier(Network(), num_classes=4))

        cd.Parallelism({"mesh": {"tp": 1}, "tp": {"plan": PLAN}, **fsdp}).prepare(state)

        meshes = {getattr(one, "device_mesh", None) for one in state.model.parameters()}
        assert [mesh.mesh_dim_names for mesh in meshes if mesh] == ([("shard",)] if fsdp else [])


@pytest.mark.usefixtures("four_unconnected")
class TestUnconnected:
    def test_data_follows_the_mesh(self):
        """The rank among the data is that of the group of the settings in use, and a sampler splits over groups."""
        parallel = cd.Parallelism({"mesh": {"replicate": 2, "tp": 2}, "tp": {"plan": PLAN}})
        assert cd.get_data_world_size() == 4
        parallel.activate()
        cd.Parallelism()

        assert (cd.get_data_rank(), cd.get_data_world_size()) == (1, 2)
        assert list(cd.get_sampler(range(8))) == [1, 3, 5, 7]

    def test_unknown_layer_raises(self):
        """The error names the pattern and modules of the model."""
        settings = cd.TensorParallelSettings(plan={"layers.*": "colwise"})

        with pytest.raises(ValueError, match=r"'layers.\*', and no module of the model has such a name. Its modules"):
            cd.mesh.split_layers(Network(), None, settings)

    def test_unknown_style_raises(self):
        """The error names the styles."""
        settings = cd.TensorParallelSettings(plan={"*": "col"})

        with pytest.raises(ValueError, match="must be 'colwise' or 'rowwise' or a ParallelStyle of torch, got 'col'"):
            cd.mesh.layer_styles(Network(), settings)

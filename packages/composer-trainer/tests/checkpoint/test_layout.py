"""Where the parts of tensors are, the file that lists them, and the files that contain them."""

import json

import pytest
import torch
from safetensors.torch import load

from composer.checkpoint import CheckpointError
from composer.checkpoint.layout import (
    Layout,
    TensorFile,
    TensorInfo,
    TensorLayout,
    bytes_of,
    describe_tensors,
    pack_files,
    plan_files,
)
from composer.functional.dtensors import Region


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
        f"model-{place:05}-of-{processes:05}.safetensors": TensorFile(1000, blocks) for place in range(1, processes + 1)
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
            ({"shape": [2**61, 2**61, 0], "cuts": [[0, 2], [0], [0]]}, "is that of no tensor"),
            ({"dtype": "float33"}, "no dtype 'float33'"),
            ({"dtype": ["float32"]}, "no dtype"),
            ({"strides": [1]}, "strides"),
            ({"placements": [1]}, "placements"),
            ({"placements": "0"}, "placements"),
            ({"other": 1}, "other"),
        ],
    )
    def test_a_tensor_that_is_not_complete(self, change, problem):
        """A tensor whose parts do not fill it, or with other values, raises an error."""
        tensors = {"model.safetensors": {"w": GOOD | change}}
        files = {"model-00001-of-00001.safetensors": {"begin": 8, "blocks": ""}}
        with pytest.raises(CheckpointError, match=rf"layout.json is not the layout of a checkpoint: .*{problem}"):
            Layout.from_bytes(json.dumps({"files": files, "tensors": tensors}).encode(), "layout.json")

    @pytest.mark.parametrize("content", [{}, {"files": [], "tensors": {}}, {"files": {"a": 1}, "tensors": {}}])
    def test_other_content(self, content):
        """JSON of another form raises an error."""
        with pytest.raises(CheckpointError, match="is not the layout of a checkpoint"):
            Layout.from_bytes(json.dumps(content).encode(), "layout.json")


def test_large_models():
    """The layout of 10,000 tensors in 64 processes has less than 20 MB, and each process finds its parts."""
    layout = large_layout(tensors=10_000, processes=64)

    content = layout.to_bytes()
    read = Layout.from_bytes(content, "layout.json")
    own = [[*one.cells(Region((64, 0), (64, 4096)))] for one in read.tensors["model.safetensors"].values()]

    assert len(content) < 20_000_000
    assert all(len(cells) == 1 and cells[0][0] == 1 for cells in own)


def described_as(parts, shape, dtype="int64"):
    """Return what each process with one of these parts describes."""
    return [{"model.safetensors": {"weight": (TensorInfo(dtype, shape, None, (0,)), Region(*part))}} for part in parts]


class TestPlans:
    def test_replicas_are_balanced(self):
        """Of eight equal tensors in four replicas, each process writes two."""
        info = TensorInfo("float32", (4,))
        one = {"model.safetensors": {f"w{place}": (info, Region((0,), (4,))) for place in range(8)}}
        _, writes = plan_files([one] * 4)
        assert [len(names) for files in writes for names in files.values()] == [2, 2, 2, 2]

    def test_other_models(self):
        """A tensor of another shape in one process raises an error with its name."""
        described = [described_as([((0,), (size,))], (size,), "float32")[0] for size in (4, 5)]
        with pytest.raises(ValueError, match=r"'weight' is float32\[5\] in process 1"):
            plan_files(described)

    @pytest.mark.parametrize(
        "parts",
        [[((0,), (2,))], [((0,), (3,)), ((2,), (2,))], [((0,), (2,)), ((3,), (1,))], [((2,), (2,))]],
    )
    def test_parts_that_do_not_fill_a_tensor(self, parts):
        """Gaps and overlaps raise an error with the name of the tensor."""
        with pytest.raises(ValueError, match="'weight' in the processes do not fill its shape"):
            plan_files(described_as(parts, (4,)))


def test_bytes_are_those_of_the_tensor():
    """What is written to the bytes is in the tensor."""
    tensor = torch.zeros(2, dtype=torch.uint8)
    bytes_of(tensor)[1] = 7

    assert tensor.tolist() == [0, 7]


def test_header_is_padded():
    """The tensors begin at a multiple of 8 bytes, and the safetensors package reads the file."""
    tensors = {"model.safetensors": {"weight": torch.arange(3.0)}}
    described = describe_tensors(tensors, is_first=True)
    _, [writes] = plan_files([described])

    [(header, weight)] = pack_files(tensors, described, writes, copy=True).values()

    assert len(header) % 8 == 0
    assert load(bytes(header) + bytes(weight))["weight"].tolist() == [0, 1, 2]

"""Where the parts of tensors are, the file that lists them, and the files that contain them."""

import pytest
import torch
from safetensors.torch import load

from composer.checkpoint import CheckpointError
from composer.checkpoint.layout import (
    TensorInfo,
    bytes_of,
    describe_tensors,
    join_process,
    pack_files,
    plan_files,
    split_process,
)
from composer.functional.dtensors import Region


def described_as(parts, shape, dtype="int64"):
    """Return what each process with one of these parts describes."""
    return [{"model.safetensors": {"weight": (TensorInfo(dtype, shape, None, (0,)), Region(*part))}} for part in parts]


class TestPlans:
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


class TestOwnOfAProcess:
    PROCESS = {"place": 3, "sum": torch.tensor([1 + 2j]), "counts": [torch.arange(3), torch.ones(2, 2).bool()]}

    def content(self):
        """Return the content of the file with what belongs to a process."""
        metadata, tensors = split_process(self.PROCESS)
        kinds, writes = {"process.safetensors": tensors}, {"process-00002-of-00002.safetensors": [*tensors]}
        [pieces] = pack_files(kinds, writes, copy=True, metadata=dict.fromkeys(writes, metadata)).values()
        return b"".join(pieces)

    def test_round_trip(self):
        """It is read as it was, also of dtypes that safetensors does not have."""
        found = join_process(self.content(), "process")

        assert found["place"] == 3
        assert torch.equal(found["sum"], self.PROCESS["sum"])
        assert all(map(torch.equal, found["counts"], self.PROCESS["counts"]))

    @pytest.mark.parametrize("content", [b"", b"7 bytes", b"\xff" * 64])
    def test_other_content(self, content):
        """A file of anything else raises an error with its path."""
        with pytest.raises(CheckpointError, match=r"runs/process is not the data of a process"):
            join_process(content, "runs/process")


def test_header_is_padded():
    """The tensors begin at a multiple of 8 bytes, and the safetensors package reads the file."""
    tensors = {"model.safetensors": {"weight": torch.arange(3.0)}}
    described = describe_tensors(tensors, is_first=True)
    _, [writes] = plan_files([described])

    [(header, weight)] = pack_files(tensors, writes, copy=True).values()

    assert len(header) % 8 == 0
    assert load(bytes(header) + bytes(weight))["weight"].tolist() == [0, 1, 2]

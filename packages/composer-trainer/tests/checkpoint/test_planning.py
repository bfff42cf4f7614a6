"""Which process writes which part of a tensor; parts of any grid are in ``test_reading.py``."""

import pytest

from composer.checkpoint.planning import TensorInfo, plan_files
from composer.functional.dtensors import Region


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

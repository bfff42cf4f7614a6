"""Collectives of two processes and of one."""

import pytest
import torch

from composer import distributed as cd


class TestTwoProcesses:
    @pytest.mark.parametrize(
        ("operation", "expected"), [("SUM", 5.0), ("avg", 2.5), ("MIN", 2.0), ("MAX", 3.0), ("PRODUCT", 6.0)]
    )
    def test_all_reduce(self, two_processes, operation, expected):
        """Both processes receive the reduction of 2 and 3."""
        assert [result["collectives"][operation] for result in two_processes] == [expected] * 2

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("sent", 1),
            ("names", ["name of 1"]),
            ("gathered", [[[0, 0], [7, 0]], [[1, 0], [7, 0]]]),
            ("objects", [{"rank": 0}, {"rank": 1}]),
            ("from_rank_zero", "name of 0"),
            ("any_rank", [True, False, True]),
            ("all_reduce_min", 15),
            ("all_agree", [True, False]),
        ],
    )
    def test_broadcast_and_gather(self, two_processes, name, expected):
        """All processes receive a broadcast value, and gather all values."""
        assert [result["collectives"][name] for result in two_processes] == [expected] * 2

    def test_groups(self, two_processes):
        """A collective of a group exchanges nothing with other processes."""
        found = [result["collectives"]["in_group"] for result in two_processes]

        assert found == [[4.0, [rank], 4.0, [rank]] for rank in range(2)]

    def test_path_that_the_first_process_cannot_read(self, two_processes):
        """What is loaded is chosen by rank 0; if it fails there, the others do not wait for it."""
        first, other = (result["source"] for result in two_processes)

        assert first.startswith("PermissionError")
        assert other.startswith("CheckpointError")
        assert "PermissionError" in other

    def test_local_rank_zero_runs_first(self, two_processes):
        """The second process starts after the first, and finds its results."""
        (first_began, first_found), (second_began, second_found) = (
            result["order"]["times"] for result in two_processes
        )

        assert first_began < second_began
        assert (first_found, second_found) == (False, True)

    def test_failure_of_rank_zero(self, two_processes):
        """Rank zero raises its own error; the other process raises and does not run the block."""
        assert two_processes[0]["order"]["failed"] == "RuntimeError: the download of 0"
        assert "A process that ran first failed" in two_processes[1]["order"]["failed"]


class TestSingleProcess:
    def test_reductions_are_the_identity(self):
        """A sum, a mean or a copy of one tensor is the tensor."""
        tensor = torch.tensor([1.0, 2.0])

        for operation in ("SUM", "AVG", "MIN"):
            cd.all_reduce(tensor, operation)
        cd.broadcast(tensor, src=0)
        gathered = cd.all_gather(tensor)

        assert tensor.tolist() == [1.0, 2.0]
        assert [part is tensor for part in gathered] == [True]

    def test_gathers_have_one_value(self):
        """Gathered values are those of the process."""
        names = ["mine"]
        cd.broadcast_object_list(names)
        cd.barrier()

        result = names, cd.all_gather_object(3), cd.from_rank_zero("run"), cd.all_agree(0.5), cd.all_reduce_min(-4)

        assert result == (["mine"], [3], "run", True, -4)
        assert (cd.any_rank(flag=True), cd.any_rank(flag=False)) == (True, False)

    def test_run_on_rank_zero(self):
        """The block runs, and its errors propagate."""
        with pytest.raises(OSError, match="disk"), cd.run_local_rank_zero_first():
            raise OSError("disk")

"""What two processes say to each other, and what one says to itself."""

import pytest
import torch

from composer import distributed as cd


class TestTwoProcesses:
    @pytest.mark.parametrize(
        ("operation", "expected"), [("SUM", 5.0), ("avg", 2.5), ("MIN", 2.0), ("MAX", 3.0), ("PRODUCT", 6.0)]
    )
    def test_all_reduce(self, two_processes, operation, expected):
        """Of 2 and 3, both get what the operation makes of them."""
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
    def test_both_get_the_same(self, two_processes, name, expected):
        """What one has sent, all have; of all, each has everything."""
        assert [result["collectives"][name] for result in two_processes] == [expected] * 2

    def test_unknown_operations_are_refused(self, two_processes):
        """The operations that there are, are named."""
        assert "must be one of SUM, AVG" in two_processes[1]["collectives"]["unknown"]

    def test_local_rank_zero_goes_first(self, two_processes):
        """The second process begins when the first is done, and finds what that has left."""
        (first_began, first_found), (second_began, second_found) = (
            result["order"]["times"] for result in two_processes
        )

        assert first_began < second_began
        assert (first_found, second_found) == (False, True)

    def test_a_failure_of_the_first_is_told(self, two_processes):
        """The first has its own error; the second is not left waiting, and does not begin."""
        assert two_processes[0]["order"]["failed"] == "RuntimeError: the download of 0"
        assert "A process that ran first failed" in two_processes[1]["order"]["failed"]


class TestAlone:
    def test_tensors_stay_as_they_are(self):
        """A sum, a mean or a copy of one is itself."""
        tensor = torch.tensor([1.0, 2.0])

        for operation in ("SUM", "AVG", "MIN"):
            cd.all_reduce(tensor, operation)
        cd.broadcast(tensor, src=0)
        gathered = cd.all_gather(tensor)

        assert tensor.tolist() == [1.0, 2.0]
        assert [part is tensor for part in gathered] == [True]

    def test_values_are_those_of_one(self):
        """What all have is what one has."""
        names = ["mine"]
        cd.broadcast_object_list(names)
        cd.barrier()

        found = names, cd.all_gather_object(3), cd.from_rank_zero("run"), cd.all_agree(0.5), cd.all_reduce_min(-4)

        assert found == (["mine"], [3], "run", True, -4)
        assert (cd.any_rank(flag=True), cd.any_rank(flag=False)) == (True, False)

    def test_unknown_operations_are_refused(self):
        """Alone, too, so that it does not come up with the second process."""
        with pytest.raises(ValueError, match=r"reduce_operation must be one of SUM, .* got 'mean'"):
            cd.all_reduce(torch.ones(1), "mean")

    def test_a_block_runs_and_its_errors_pass(self):
        """The first of one runs its block as it is."""
        with pytest.raises(OSError, match="disk"), cd.run_local_rank_zero_first():
            raise OSError("disk")

    def test_a_missing_group_is_named(self, monkeypatch):
        """Several processes that nobody has connected do not count as one."""
        monkeypatch.setenv("WORLD_SIZE", "2")

        with pytest.raises(RuntimeError, match=r"initialize_dist\(device\) first"):
            cd.all_reduce(torch.ones(1))

"""Two processes do what one does: DDP and FSDP2, with parts, microbatches and last batches of any size."""

import math

import pytest
import torch
from torch import nn

from composer import distributed as cd
from composer.core import State

LAWS = [
    "ddp",
    "ddp, microbatches",
    "ddp, a sample at a time",
    "ddp, multi",
    "ddp, forced",
    "ddp, sam",
    "ddp, clipped",
    "ddp, unused",
    "ddp, unused by an algorithm",
    "ddp, unused, multi",
    "ddp, unused, forced",
    "ddp, frozen",
    "ddp, frozen, forced",
    "fsdp",
    "fsdp, microbatches",
    "fsdp, multi",
    "fsdp, adam",
    "fsdp, only the whole",
    "fsdp, chosen blocks",
    "fsdp, sam",
    "fsdp, norm",
    "fsdp, value",
    "fsdp, adaptive",
    "fsdp, frozen",
]


class TestTwoProcesses:
    @pytest.mark.parametrize("law", LAWS)
    def test_they_do_what_one_does(self, two_processes, law):
        """Two parts of each batch give the same weights as plain torch with complete batches, up to rounding."""
        assert [result["laws"][law]["distance"] < 1e-14 for result in two_processes] == [True, True]

    @pytest.mark.parametrize("law", LAWS)
    def test_they_have_the_same_bits(self, two_processes, law):
        """Every process ends with the same weights, bit for bit."""
        assert [result["laws"][law]["same bits"] for result in two_processes] == [True, True]

    @pytest.mark.parametrize("law", LAWS)
    def test_they_know_the_loss_of_the_whole(self, two_processes, law):
        """The mean of the weighed losses is the loss of the whole batch, the uneven last one."""
        for result in two_processes:
            together, alone = result["laws"][law]["loss"]
            assert math.isclose(together, alone, rel_tol=1e-12)

    def test_every_law_is_tested(self, two_processes):
        """What the processes were made to do is what is looked at here."""
        assert list(two_processes[0]["laws"]) == LAWS

    @pytest.mark.parametrize(
        ("strategy", "expected"),
        [
            ("single_auto_sync", [False, True, True]),
            ("multi_auto_sync", [True, True, True]),
            ("forced_sync", [False, False, True]),
        ],
    )
    def test_gradients_are_added_up_when_they_should(self, two_processes, strategy, expected):
        """After the first microbatch, the second, and the batch; in one that is tried apart, never."""
        assert [result["when"][strategy] for result in two_processes] == [[*expected, *[False] * 3, *expected]] * 2

    def test_models_become_equal(self, two_processes):
        """Of different seeds, that of rank 0 counts, buffers and tensors that are not contiguous included."""
        assert [result["equalised"]["equal"] for result in two_processes] == [True, True]

    def test_other_models_are_refused(self, two_processes):
        """Different models raise an error in both processes, and none waits for the other."""
        for result in two_processes:
            assert "ValueError: The processes have different models" in result["equalised"]["refused"]

    def test_buffers_become_equal(self, two_processes):
        """Running means and counts are those of rank 0."""
        assert [result["buffers"] for result in two_processes] == [[[5.0, 5.0], 3]] * 2

    def test_buffers_are_equal_after_a_forced_sync(self, two_processes):
        """Rank 0 has seen means of 1 and 3, of which a tenth is taken."""
        for result in two_processes:
            assert result["forced buffers"] == pytest.approx([0.1, 0.3])

    def test_each_holds_a_part(self, two_processes):
        """Of weights and momenta each process has its part; together they have each once."""
        sharding = [result["sharding"] for result in two_processes]

        assert sharding[0]["totals"] == sharding[0]["sizes"]
        assert all(held < size for held, size in zip(sharding[0]["held"], sharding[0]["sizes"], strict=True))
        assert [each["momenta"] for each in sharding] == [each["held"] for each in sharding]

    def test_shards_compute_in_16_bits(self, two_processes):
        """In amp_bf16 the model computes in 16 bits, and its gradients have 32."""
        sharding = two_processes[0]["sharding"]

        assert (sharding["outputs"], sharding["gradients"]) == ("torch.bfloat16", "torch.float32")

    def test_a_model_sharded_by_its_user_is_run(self, two_processes):
        """It is neither wrapped nor sharded again, and does what one process does."""
        assert [result["own sharding"] < 1e-14 for result in two_processes] == [True, True]

    def test_batches_are_added_up(self, two_processes):
        """Samples 3 and 5, tokens 10 and 11, seconds 1 and 2, parts 1 and 2, counted 1 and 3; one wants to stop."""
        first, second = (result["totals"]["totals"] for result in two_processes)

        assert first == [8, 21, 1.5, 2, 0.5, True]
        assert second == [8, 21, 1.5, 2, 1.5, True]

    def test_losses_are_averaged(self, two_processes):
        """Of 1 and 2 the mean is 1.5, in 32 bits also where one of the losses has 16."""
        assert [result["totals"]["means"] for result in two_processes] == [{"a": 1.5, "b": 4.0}] * 2

    def test_a_batch_without_samples_is_refused(self, two_processes):
        """Nothing can be the mean of nothing."""
        for result in two_processes:
            said = "No process has a sample (or token, if those are weighed) to train on in this batch."
            assert result["totals"]["nothing"] == f"ValueError: {said}"


class TestAlone:
    def test_the_model_is_run_as_it_is(self):
        """One process needs no wrapper, and a batch is its own."""
        state, parallel = State(nn.Linear(2, 2)), cd.Parallelism()

        parallel.prepare(state)
        parallel.begin_batch(3, 7, microbatches=2, seconds=0.5, stop=True)

        assert parallel.forward is state.model
        assert parallel.totals() == cd.BatchTotals(3, 7, 0.5, 2, 1.0, True)
        assert parallel.padded([("part", 1.0)]) == [("part", 1.0)]

    def test_another_model_is_taken(self):
        """Prepared again, it runs the model that the state has now."""
        state, parallel = State(nn.Linear(2, 2)), cd.Parallelism(ddp_sync_strategy="forced_sync")
        parallel.prepare(state)
        state.model = nn.Linear(3, 3)

        parallel.prepare(state)

        assert parallel.forward is state.model
        assert parallel.end_batch() is None

    def test_losses_are_its_own(self):
        """The mean over one process is what it has."""
        parallel, loss = cd.Parallelism(), torch.tensor(2.0)
        parallel.prepare(State(nn.Linear(2, 2)))

        assert parallel.reduce_mean({"total": loss})["total"] is loss

    def test_nothing_runs_unprepared(self):
        """What would happen without is not left to chance."""
        with pytest.raises(RuntimeError, match=r"Call Parallelism\.prepare\(state\) before"):
            cd.Parallelism().forward(torch.ones(1))

    def test_sharding_works_alone(self):
        """With one process, as for keeping weights in the host's memory; no environment has to be set."""
        torch.manual_seed(0)
        model, inputs = nn.Linear(2, 1), torch.ones(3, 2)
        expected = nn.Linear(2, 1)
        expected.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel = cd.Parallelism({"fsdp": {}})

        try:
            parallel.prepare(State(model, optimizers=optimizer))
            parallel.begin_batch(3)
            for is_last in (False, True):
                parallel.begin_microbatch(is_last)
                parallel.forward(inputs).sum().backward()
            optimizer.step()
            own = model.weight.full_tensor()
        finally:
            cd.close_dist()

        (2 * expected(inputs).sum()).backward()
        assert torch.allclose(own, expected.weight - 0.1 * expected.weight.grad)
        assert not cd.is_initialized()


class TestSettings:
    @pytest.mark.parametrize(
        ("config", "error", "message"),
        [
            ({"tp": {}}, ValueError, r"parallelism_config\['tp'\]: tensor parallelism is not supported"),
            ({"fsdp": {}, "ddp": {}}, ValueError, "must be None, .* got 'fsdp', 'ddp'"),
            ({"zero": {}}, ValueError, "must be None, .* got 'zero'"),
            ({"fsdp": True}, TypeError, r"parallelism_config\['fsdp'\] must be a dictionary, got bool"),
            ("fsdp", TypeError, "parallelism_config must be None or a dictionary, got str"),
            ({"ddp": {"buckets": 3}}, ValueError, r"\['ddp'\] takes find_unused_parameters, .* got 'buckets'"),
            ({"ddp": {"find_unused_parameters": 1}}, TypeError, "find_unused_parameters"),
        ],
    )
    def test_bad_configurations_are_refused(self, config, error, message):
        """At once, with what is possible."""
        with pytest.raises(error, match=message):
            cd.Parallelism(config)

    @pytest.mark.parametrize("config", [None, {}, {"fsdp": None}, {"ddp": {}, "tp": None}])
    def test_what_is_none_is_not_there(self, config):
        """A key without settings is as if it were left out."""
        parallel = cd.Parallelism(config)
        parallel.prepare(State(nn.Linear(2, 2)))

        assert isinstance(parallel.forward, nn.Linear)

    @pytest.mark.parametrize("strategy", ["sometimes", 3])
    def test_unknown_strategies_are_refused(self, strategy):
        """Those that there are, are named."""
        with pytest.raises(ValueError, match="must be one of single_auto_sync, multi_auto_sync, forced_sync, got"):
            cd.Parallelism(ddp_sync_strategy=strategy)

    def test_shards_cannot_be_forced(self):
        """Gradients that are sharded are added up with a backward pass."""
        with pytest.raises(ValueError, match="'forced_sync' is for DDP, and parallelism_config contains 'fsdp'"):
            cd.Parallelism({"fsdp": {}}, cd.DDPSyncStrategy.FORCED_SYNC)

"""Two processes equal one: DDP and FSDP2 with microbatches and last batches of any size."""

import math

import pytest
import torch
from torch import nn

from composer import distributed as cd
from composer.algorithms import DiLoCo, StochasticDepth
from composer.core import State
from composer.distributed import parallelism


class TestTwoProcesses:
    def test_steps_are_those_of_one_process(self, two_processes):
        """In each way, weights and losses equal those of plain torch, and the bits of all processes are equal."""
        for result in two_processes:
            for law, found in result["laws"].items():
                assert found["distance"] < 1e-14, law
                assert found["same bits"], law
                assert math.isclose(*found["loss"], rel_tol=1e-12), law

    @pytest.mark.parametrize(
        ("strategy", "expected"),
        [
            ("single_auto_sync", [False, True, True]),
            ("multi_auto_sync", [True, True, True]),
        ],
    )
    def test_gradient_synchronization(self, two_processes, strategy, expected):
        """Gradients are reduced after the first or last microbatch, or the batch, and never in a trial."""
        assert [result["when"][strategy] for result in two_processes] == [[*expected, *[False] * 3, *expected]] * 2

    def test_models_are_broadcast(self, two_processes):
        """All processes receive rank 0's model, including buffers and non-contiguous tensors."""
        assert [result["equalised"]["equal"] for result in two_processes] == [True, True]

    def test_different_models_raise(self, two_processes):
        """Different models raise in both processes, without waiting."""
        for result in two_processes:
            assert "ValueError: The processes have different models" in result["equalised"]["refused"]

    def test_buffers_are_broadcast(self, two_processes):
        """Running statistics are those of rank 0."""
        assert [result["buffers"] for result in two_processes] == [[[5.0, 5.0], 3]] * 2

    def test_weights_are_sharded(self, two_processes):
        """Each process has a part of weights and momenta; the parts are disjoint and complete."""
        sharding = [result["sharding"] for result in two_processes]

        assert sharding[0]["totals"] == sharding[0]["sizes"]
        assert all(
            size_of_shard < size for size_of_shard, size in zip(sharding[0]["held"], sharding[0]["sizes"], strict=True)
        )
        assert [each["momenta"] for each in sharding] == [each["held"] for each in sharding]

    def test_shards_compute_in_16_bits(self, two_processes):
        """In amp_bf16 the model computes in 16 bits, with gradients in 32."""
        sharding = two_processes[0]["sharding"]

        assert (sharding["outputs"], sharding["gradients"]) == ("torch.bfloat16", "torch.float32")

    def test_user_sharded_model(self, two_processes):
        """It is neither wrapped nor sharded again, and equals one process."""
        assert [result["own sharding"] < 1e-14 for result in two_processes] == [True, True]

    def test_batch_totals_are_summed(self, two_processes):
        """Samples, tokens, seconds, microbatches and counts are summed; one process requests a stop."""
        first, second = (result["totals"]["totals"] for result in two_processes)

        assert first == [8, 21, 1.5, 2, 0.5, True]
        assert second == [8, 21, 1.5, 2, 1.5, True]

    def test_weight_is_known_before_the_totals(self, two_processes):
        """With 1 and 3 samples where 4 are usual."""
        found = [result["totals"] for result in two_processes]

        assert [one["early weight"] for one in found] == [0.25, 0.75]
        assert [one["counted"] for one in found] == [4, 4]

    def test_losses_are_averaged(self, two_processes):
        """The mean of 1 and 2 is 1.5, in 32 bits also if a loss has 16."""
        assert [result["totals"]["means"] for result in two_processes] == [{"a": 1.5, "b": 4.0}] * 2

    def test_empty_batch_raises(self, two_processes):
        """A batch without samples in all processes raises."""
        for result in two_processes:
            said = "No process has a sample (or token, if those are weighed) to train on in this batch."
            assert result["totals"]["nothing"] == f"ValueError: {said}"


class TestSingleProcess:
    def test_model_is_not_wrapped(self):
        """One process needs no wrapper, and totals are its own."""
        state, parallel = State(nn.Linear(2, 2)), cd.Parallelism()

        parallel.prepare(state)
        batch = parallel.exchange_counts(own := cd.BatchShare(3, 7, microbatches=2, seconds=0.5, stop=True))

        assert parallel.forward is state.model
        assert batch.totals() == cd.GlobalBatch.of([own.to_row()])
        assert (own.elements, batch.weight()) == (3, 1.0)
        assert parallel.padded([("part", 1.0)], batch) == [("part", 1.0)]

    def test_sharding_with_one_process(self):
        """Sharding works with one process, without environment variables."""
        torch.manual_seed(0)
        model, inputs = nn.Linear(2, 1), torch.ones(3, 2)
        expected = nn.Linear(2, 1)
        expected.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel = cd.Parallelism({"fsdp": {}})

        try:
            parallel.prepare(State(model, optimizers=optimizer))
            parallel.exchange_counts(cd.BatchShare(3))
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


def test_different_layers_in_each_process_raise(monkeypatch):
    """With FSDP2, an algorithm that draws in each process which layers a step uses raises an error."""
    monkeypatch.setattr(parallelism, "get_data_world_size", lambda: 2)
    algorithms = [StochasticDepth("ResNetBottleneck")]

    with pytest.raises(ValueError, match=r"StochasticDepth draws in each process which layers .*'sample'"):
        cd.Parallelism({"fsdp": {}}).prepare(State(nn.Linear(2, 2), algorithms=algorithms))


def test_other_trained_layers_keep_the_weights_of_each_process(monkeypatch):
    """With DiLoCo, the weights of rank 0 are broadcast at first, and not when other layers are trained."""
    broadcast, model = [], nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    monkeypatch.setattr(parallelism, "is_connected", lambda: True)
    monkeypatch.setattr(parallelism, "broadcast_model", broadcast.append)
    parallel, state = cd.Parallelism(), State(model, algorithms=[DiLoCo()])
    for is_trained in (True, False):
        model[0].requires_grad_(is_trained)
        parallel.prepare(state)

    assert broadcast == [model]


class TestSyncBatchNorm:
    @pytest.mark.gpu
    @pytest.mark.parametrize("kind", ["ddp", "fsdp"])
    def test_weights_equal_one_process(self, start_sync_batchnorm, kind):
        """Two processes with uneven parts and microbatches train as one process; they take more than 5 seconds."""
        if kind == "fsdp" and torch.cuda.device_count() < 2:
            pytest.skip("NCCL needs a GPU for each process, and FSDP2 on gloo ends in a segmentation fault on a GPU")
        for result in start_sync_batchnorm(kind):
            assert result["layers"] == ["SyncBatchNorm"]
            assert result["found"] == pytest.approx(result["expected"], rel=1e-10, abs=1e-12)

"""Microbatches whose size is found when memory runs out."""

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer import functional as cf
from composer.core import Callback
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from fixtures import make_loader, small_run
from fixtures.processes import run_processes


class RunningMean(nn.Module):
    """A layer that counts its batches and averages their means, and returns its input."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, inputs):
        self.count += 1
        self.mean += (inputs.detach().mean(0) - self.mean) / self.count
        return inputs


class LimitedMemory(nn.Module):
    """A network with a running mean and dropout on a device for at most ``capacity`` samples."""

    def __init__(self, capacity, layer=RunningMean):
        """Of equal weights each time."""
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), layer(8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.capacity = capacity
        self.tried = []

    def forward(self, inputs):
        """Run out of memory in the middle, after a layer has counted and dropout has drawn."""
        self.tried.append(len(inputs))
        if not self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        hidden = self.layers[:3](inputs)
        if len(inputs) > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.layers[3](hidden)


def trained(capacity, size, layer=RunningMean, **options):
    """Return a trainer after three batches of eight, and its network."""
    network = LimitedMemory(capacity, layer)
    model = ComposerClassifier(network, num_classes=3)
    trainer = small_run(
        model=model,
        train_dataloader=make_loader(samples=24, batch_size=8),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        device_train_microbatch_size=size,
        max_duration="3ba",
        **options,
    )
    trainer.fit()
    return trainer, network


class TestAuto:
    @pytest.mark.parametrize(("capacity", "result"), [(100, 8), (8, 8), (7, 4), (3, 2)])
    def test_finds_the_size(self, capacity, result):
        """Sizes are halved from the complete batch until they fit, once."""
        trainer, network = trained(capacity, "auto")

        assert max(size for size in network.tried[-3:]) == min(result, 8)
        assert trainer.state.device_train_microbatch_size in {result, None}

    @pytest.mark.parametrize("capacity", [7, 3])
    def test_failed_trials_have_no_side_effects(self, capacity):
        """Weights, running statistics and metrics are bit-identical to those with the final size."""
        searched, _ = trained(capacity, "auto", loggers=(log := InMemoryLogger()))
        passed, _ = trained(100, searched.state.device_train_microbatch_size, loggers=(want := InMemoryLogger()))

        for one, other in zip(
            searched.state.model.state_dict().values(), passed.state.model.state_dict().values(), strict=True
        ):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
        for name in ("loss/train/total", "metrics/train/MulticlassAccuracy"):
            assert [value for _, value in log.data[name]] == [value for _, value in want.data[name]]

    def test_trial_that_fails_after_unscaling(self):
        """With a scaled loss, a batch that fails after its backward pass is computed again."""

        class Fails(Callback):
            calls = 0

            def after_train_batch(self, state, logger):
                self.calls += 1
                if self.calls == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory.")

        trainer, network = trained(100, "auto", precision="amp_fp16", callbacks=Fails())

        assert network.tried == [8, 4, 4, 4, 4, 4, 4]
        assert trainer.state.timestamp.batch == 3
        assert trainer.state.scaler.get_scale() == 65536

    def test_no_size_fits(self):
        """If a single sample does not fit, an error is raised."""
        with pytest.raises(RuntimeError, match="a single sample needs more memory"):
            trained(0, "auto")

    @pytest.mark.parametrize("layer", [nn.BatchNorm1d, functools.partial(cf.GhostBatchNorm1d, ghost_batch_size=8)])
    def test_does_not_split_what_normalizes_by_the_batch(self, layer):
        """With BatchNorm, smaller microbatches would be another step, so the size is not reduced."""
        trained(8, "auto", layer)

        with pytest.raises(RuntimeError, match=r"8 samples do not fit .* normalizes by the samples of a microbatch"):
            trained(7, "auto", layer)

    def test_splits_between_ghost_batches(self):
        """Microbatches that are multiples of the ghost batches are the same step."""
        trainer, _ = trained(7, "auto", functools.partial(cf.GhostBatchNorm1d, ghost_batch_size=4))

        assert trainer.state.device_train_microbatch_size == 4


@pytest.mark.skipif("reset_iter_state" not in vars(FSDPModule), reason="this torch cannot continue after an error")
class TestSharded:
    def test_one_process(self):
        """A sharded model starts over, and its results are bit-identical to those with the final size."""
        sharded = {"parallelism_config": {"fsdp": {}}}
        searched, network = trained(3, "auto", **sharded)
        passed, _ = trained(100, 2, **sharded)
        torch.distributed.destroy_process_group()

        assert network.tried == [8, 4, *[2] * 12]
        for one, other in zip(searched.state.model.parameters(), passed.state.model.parameters(), strict=True):
            assert torch.equal(one.to_local(), other.to_local())

    @pytest.mark.parametrize("number", [2, 4])
    def test_out_of_memory_in_one_process(self, number):
        """All use the size that fits in the one, with bit-identical results, wherever it runs out of memory.

        Two processes also run out of it in the second batch: once the optimizer has a state, there is less memory, and
        a size that fits in the first batch is tried again. Four, whose cases are other meshes, do so in the first only.
        """
        printed = run_processes(Path(__file__).with_name("size_search_program.py"), number)

        for rank, output in enumerate(printed):
            found = json.loads(output.splitlines()[-1])
            first = [2, True, [8, 4, 2 if rank == 1 else 4]]
            # A trial that succeeds and the batch; in the second batch a trial that fails in a process, and another one.
            second = [4, True, [8, 8, 8, 4, 4, 4]]
            assert found == {case: second if "second" in case else first for case in found}

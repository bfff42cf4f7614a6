"""The arguments by which processes share a batch and a model are checked at construction."""

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer import distributed as cd
from composer.core import State

PLAN = {"layers.*": "colwise"}


class TestSettings:
    @pytest.mark.parametrize(
        ("config", "error", "message"),
        [
            ({"tp": {"degree": 2}}, ValueError, r"parallelism_config\['tp'\] takes plan, got 'degree'"),
            ({"fsdp": {}, "ddp": {}}, ValueError, "must be None, .* got 'fsdp', 'ddp'"),
            ({"zero": {}}, ValueError, "must be None, .* got 'zero'"),
            ({"fsdp": True}, TypeError, r"parallelism_config\['fsdp'\] must be a dictionary, got bool"),
            ("fsdp", TypeError, "parallelism_config must be None or a dictionary, got str"),
            ({"ddp": {"buckets": 3}}, ValueError, r"\['ddp'\] takes find_unused_parameters, .* got 'buckets'"),
            ({"ddp": {"find_unused_parameters": 1}}, TypeError, "find_unused_parameters"),
        ],
    )
    def test_bad_configurations_raise(self, config, error, message):
        """The error lists the valid settings."""
        with pytest.raises(error, match=message):
            cd.Parallelism(config)

    @pytest.mark.parametrize("config", [None, {}, {"fsdp": None}, {"ddp": {}, "tp": None}])
    def test_none_settings_are_ignored(self, config):
        """A key with the value None is ignored."""
        parallel = cd.Parallelism(config)
        parallel.prepare(State(nn.Linear(2, 2)))

        assert isinstance(parallel.forward, nn.Linear)

    @pytest.mark.parametrize("strategy", ["sometimes", 3])
    def test_unknown_strategy_raises(self, strategy):
        """The error lists the strategies."""
        with pytest.raises(ValueError, match="must be one of single_auto_sync, multi_auto_sync, forced_sync, got"):
            cd.Parallelism(ddp_sync_strategy=strategy)

    def test_automatic_microbatches_raise(self, monkeypatch):
        """Trials in one process alone would wait for the others, or leave a sharded model in the middle of a step."""
        with pytest.raises(ValueError, match="tensor parallelism, SyncBatchNorm, and FSDP2 of"):
            cd.Parallelism().config.check_microbatch_size("auto", nn.Sequential(nn.SyncBatchNorm(4)))
        monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
        with pytest.raises(ValueError, match=r"FSDP2 of a torch without FSDPModule.reset_iter_state"):
            cd.Parallelism({"fsdp": {}}).config.check_microbatch_size("auto", nn.Linear(2, 2))


@pytest.mark.usefixtures("four_unconnected")
class TestMesh:
    @pytest.mark.parametrize(
        ("config", "error", "message"),
        [
            ({"mesh": {"shard": 3}}, ValueError, "replicate=1, shard=3 and tp=1 is for 3 processes, and there are 4"),
            ({"mesh": {"shard": 0}}, ValueError, "shard must be at least 1, got 0. It is a number of processes"),
            ({"mesh": {"tp": True}}, TypeError, "tp must be an int, got True"),
            ({"ddp": {"bucket_cap_mb": True}}, TypeError, "bucket_cap_mb must be an int, got True"),
            ({"mesh": {"tensor": 4}}, ValueError, r"\['mesh'\] takes replicate, shard, tp, got 'tensor'"),
            ({"mesh": {"tp": 4}}, ValueError, "has tp=4, but no plan of the layers to split"),
            ({"tp": {"plan": PLAN}}, ValueError, "requires the number of processes that share a layer"),
            ({"mesh": {"shard": 4}, "ddp": {"bucket_cap_mb": 1}}, ValueError, "requires FSDP2: remove 'ddp'"),
        ],
    )
    def test_contradictions_raise(self, config, error, message):
        """At construction, with the remedy."""
        with pytest.raises(error, match=message):
            cd.Parallelism(config)

    @pytest.mark.parametrize("degrees", [{"replicate": 2, "shard": 2}, {"replicate": 4}])
    def test_degree_is_missing(self, degrees):
        """A plan requires a degree, also in a mesh with other dimensions."""
        with pytest.raises(ValueError, match="requires the number of processes that share a layer"):
            cd.Parallelism({"mesh": degrees, "tp": {"plan": PLAN}})

    def test_degree_of_one(self):
        """With an explicit tp=1, a plan is accepted and splits no model without FSDP2."""
        for degrees, splits in (({"replicate": 4}, False), ({"replicate": 2, "shard": 2}, True)):
            parallel = cd.Parallelism({"mesh": {**degrees, "tp": 1}, "tp": {"plan": PLAN}})
            assert parallel.config.splits_model is splits

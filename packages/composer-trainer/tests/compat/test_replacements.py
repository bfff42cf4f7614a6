"""Functions that only serve former names."""

import random
import threading
import time

import numpy as np
import pytest
import torch

from composer.compat.replacements import (
    FSDPConfig,
    ParallelismConfig,
    TPConfig,
    create_interval_scheduler,
    ensure_tuple,
    get_node_signal_file_name,
    get_rng_state,
    load_rng_state,
    local_rank_zero_download_and_wait,
    retry,
    seed_context,
    write_signal_file,
)
from composer.core import Callback, Event
from composer.distributed.config import ParallelismConfig as Config
from composer.foreign.fsdp1 import translate_sections
from fixtures import small_run


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, ()), (3, (3,)), ("ab", ("ab",)), (b"ab", (b"ab",)), ([1, 2], (1, 2)), ((), ()), ({"a": 1}, (1,))],
)
def test_ensure_tuple(given, expected):
    """Sequences and values of mappings become tuples; anything else is one item."""
    assert ensure_tuple(given) == expected


@pytest.mark.parametrize(
    ("interval", "options", "duration", "expected"),
    [
        # A training in epochs ends at EPOCH_CHECKPOINT; an interval that ends there is due at its own event alone.
        ("5ba", {}, "2ep", ["batch_checkpoint 5", "batch_checkpoint 10"]),
        ("4ba", {}, "1ep", ["batch_checkpoint 4", "epoch_checkpoint 5"]),
        ("4ba", {"final_events": {Event.BATCH_CHECKPOINT}}, "1ep", ["batch_checkpoint 4"]),
        ("4ba", {"final_events": {"fit_end"}}, "1ep", ["batch_checkpoint 4", "fit_end 5"]),
        ("1ep", {}, "2ep", ["epoch_checkpoint 5", "epoch_checkpoint 10"]),
        ("4ba", {"checkpoint_events": False}, "1ep", ["batch_end 4", "epoch_checkpoint 5"]),
        ("4ba", {}, "5ba", ["batch_checkpoint 4", "batch_checkpoint 5", "epoch_checkpoint 5"]),
        ("3ba", {}, "4ba", ["batch_checkpoint 3", "batch_checkpoint 4"]),
        ("100ba", {"include_end_of_training": False}, "1ep", []),
    ],
)
def test_events_of_interval_schedulers(interval, options, duration, expected):
    """A schedule is due at the events at which that of Composer 0.32.1 is due in the same training."""
    is_due, due = create_interval_scheduler(interval, **options), []

    class Recorder(Callback):
        def run_event(self, event, state, logger):
            if is_due(state, event):
                due.append(f"{event.value} {state.timestamp.batch.value}")

    with small_run(max_duration=duration, callbacks=Recorder()) as trainer:
        trainer.fit()

    assert due == expected


@pytest.mark.filterwarnings("ignore:.*_convert_time is a former name:DeprecationWarning")
def test_a_schedule_with_a_former_helper_trains():
    """A schedule of a program that uses ``_convert_time`` sets the rates of its formula."""
    from composer.optim import scheduler as module

    def warmup(state, ssr=1.0):
        length = module._convert_time("0.5dur", state, ssr=ssr)
        return min((state.timestamp.get(length.unit) + 1).value / length.value, 1.0)

    rates = []
    with small_run(max_duration="2ep", schedulers=warmup) as trainer:
        trainer.engine.on("batch_start", lambda state, _: rates.append(state.schedulers[0].get_last_lr()[0]))
        trainer.fit()

    assert [rate / rates[-1] for rate in rates] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1, 1])


def test_generators_are_restored():
    """After the states are loaded, Python, NumPy and torch draw the same numbers again."""
    states = get_rng_state()

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    first = draw()
    load_rng_state(states)

    assert draw() == first
    load_rng_state([])
    assert draw() != first


def test_waiting_for_a_file(monkeypatch, tmp_path):
    """The first process runs at once; another one waits until the file exists, and writes none."""
    name = get_node_signal_file_name()
    with local_rank_zero_download_and_wait(str(tmp_path / name)):
        path = write_signal_file(name, str(tmp_path))
    (tmp_path / name).unlink()
    monkeypatch.setenv("LOCAL_RANK", "1")
    threading.Timer(0.3, (tmp_path / name).touch).start()
    begin = time.monotonic()

    with local_rank_zero_download_and_wait(write_signal_file(name, str(tmp_path))):
        waited = time.monotonic() - begin

    assert path == str(tmp_path / name)
    assert waited >= 0.25


def test_functions_are_tried_again():
    """A function is called until it succeeds or the attempts are used up; other errors are raised at once."""
    calls = []

    @retry((OSError, KeyError), num_attempts=3, initial_backoff=0.0, max_jitter=0.001)
    def fail(error, times):
        calls.append(error)
        if len(calls) <= times:
            raise error("a")
        return len(calls)

    assert fail(OSError, 2) == 3
    calls.clear()
    with pytest.raises(KeyError):
        fail(KeyError, 3)
    assert len(calls) == 3
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError, 9)
    assert len(calls) == 4
    assert fail.__name__ == "fail"


@pytest.mark.parametrize(
    ("given", "reshards"),
    [
        ({"fsdp": FSDPConfig()}, True),
        ({"fsdp": FSDPConfig(sharding_strategy="SHARD_GRAD_OP", state_dict_type="sharded")}, False),
        (ParallelismConfig(FSDPConfig(use_orig_params=True)), True),
        (ParallelismConfig(fsdp2=FSDPConfig(reshard_after_forward=False)), False),
    ],
)
def test_settings_of_fsdp(given, reshards):
    """Composer's objects are accepted as the settings of FSDP2, without those of FSDP1."""
    settings = Config.from_arguments(translate_sections(given), None)

    assert settings.fsdp.reshard_after_forward is reshards


def test_settings_of_tensor_parallelism(monkeypatch):
    """The other processes shard the model with FSDP2, and replicate it without."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    tp = TPConfig(tensor_parallel_degree=2, layer_plan={"*.in": "colwise"})

    sharded, replicated = (
        Config.from_arguments(translate_sections(ParallelismConfig(fsdp, tp)), None) for fsdp in (FSDPConfig(), None)
    )

    assert (sharded.mesh.tp, sharded.mesh.shard, sharded.tp.plan) == (2, 2, {"*.in": "colwise"})
    assert (replicated.mesh.tp, replicated.mesh.replicate, replicated.mesh.shard) == (2, 2, 1)


@pytest.mark.parametrize(
    ("given", "mesh", "reshards"),
    [
        (FSDPConfig("HYBRID_SHARD"), (4, 2, 1), True),
        (FSDPConfig(sharding_strategy="_HYBRID_SHARD_ZERO2", data_parallel_shard_degree=4), (2, 4, 1), False),
        ({"sharding_strategy": "FULL_SHARD", "data_parallel_replicate_degree": 2}, (2, 4, 1), True),
        ({"sharding_strategy": "full_shard", "data_parallel_replicate_degree": 2}, (2, 4, 1), True),
        ({"sharding_strategy": "_hybrid_shard_zero2"}, (4, 2, 1), False),
    ],
)
def test_replicas_of_sharded_models(monkeypatch, given, mesh, reshards):
    """A hybrid strategy shards on each machine and replicates over machines; degrees are those of the mesh."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    settings = Config.from_arguments(translate_sections({"fsdp": given}), None)

    assert (settings.mesh.replicate, settings.mesh.shard, settings.mesh.tp) == mesh
    assert settings.fsdp.reshard_after_forward is reshards


def test_a_block_with_a_seed():
    """The generators draw as after the seed, and continue afterwards as if nothing had happened."""
    torch.manual_seed(3)
    first = torch.rand(2)
    torch.manual_seed(3)

    with seed_context(17):
        drawn = torch.rand(2)

    assert torch.equal(torch.rand(2), first)
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(17)))


@pytest.mark.filterwarnings("ignore:composer.algorithms:DeprecationWarning")
def test_the_registry_of_alibi():
    """A function that is registered for a class of modules changes those of a model."""
    from composer.algorithms.alibi.attention_surgery_functions import policy_registry

    from composer.functional import apply_alibi

    class Attention(torch.nn.Module):
        length = 8

    @policy_registry.register(Attention)
    def lengthen(module, index, max_sequence_length):
        module.length = max_sequence_length + index
        return module

    model = torch.nn.Sequential(Attention(), torch.nn.Linear(2, 2), Attention())
    apply_alibi(model, max_sequence_length=64)
    del policy_registry[Attention]

    assert [model[0].length, model[2].length] == [64, 65]

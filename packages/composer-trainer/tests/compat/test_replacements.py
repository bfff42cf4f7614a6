"""Functions that only serve former names."""

import random
import threading
import time
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from composer.callbacks import CheckpointSaver
from composer.compat.replacements import (
    FSDPConfig,
    MissingConditionalImportError,
    ParallelismConfig,
    TPConfig,
    check_max_duration,
    convert_flat_dict_to_nested_dict,
    convert_nested_dict_to_flat_dict,
    create_interval_scheduler,
    ensure_tuple,
    get_node_signal_file_name,
    get_rng_state,
    initial_microbatch_size,
    is_model_ddp,
    load_rng_state,
    local_rank_zero_download_and_wait,
    map_collection,
    retry,
    seed_context,
    split_list,
    write_signal_file,
)
from composer.core import Callback, Event, State, Time
from composer.distributed.config import ParallelismConfig as Config
from composer.optim.clock import convert_time
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
        ("2ba", {}, "1ep", ["ep0-ba2", "ep0-ba4", "ep1-ba5"]),
        ("2ba", {"include_end_of_training": False}, "1ep", ["ep0-ba2", "ep0-ba4"]),
        (1, {}, "2ep", ["ep1-ba5", "ep2-ba10"]),
        ("4ba", {}, "6ba", ["ep0-ba4", "ep1-ba6"]),
        (0, {}, "1ep", []),
    ],
)
def test_interval_schedulers(tmp_path, interval, options, duration, expected):
    """A schedule is due at each interval, and once at the end of the training; a CheckpointSaver accepts it."""
    saver = CheckpointSaver(str(tmp_path), save_interval=create_interval_scheduler(interval, **options))

    with small_run(max_duration=duration, callbacks=saver) as trainer:
        trainer.fit()

    assert sorted(path.name for path in tmp_path.glob("ep*")) == expected


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


def test_models_are_not_wrapped():
    """The model of a state is not in a DistributedDataParallel."""
    assert not is_model_ddp(small_run().state.model)


@pytest.mark.parametrize(
    ("given", "options", "ssr", "expected"),
    [
        ("0.29dur", {"max_duration": "100ba"}, 2.0, "29ba"),
        ("0.5dur", {"max_duration": "3ep"}, 1.0, "1ep"),
        ("0.5dur", {"max_duration": "3ep", "dataloader_len": 10}, 1.0, "15ba"),
        (Time(2, "ep"), {"dataloader_len": 10}, 0.5, "10ba"),
        ("2ep", {}, 0.5, "1ep"),
        ("100tok", {}, 0.25, "25tok"),
    ],
)
def test_times_of_schedules(given, options, ssr, expected):
    """Times are scaled, durations are a part of the training, and epochs are counted in batches where possible."""
    assert convert_time(given, State(model=None, **options), ssr) == Time.from_timestring(expected)


def test_a_schedule_must_not_end_before_the_training():
    """A training that is longer than the schedule is an error, if the two can be compared."""
    state = State(model=None, max_duration="3ep", dataloader_len=10)

    with pytest.raises(ValueError, match="t_max must be at least max_duration, 3ep, got 29ba"):
        check_max_duration("29ba", state)
    for t_max in ("30ba", "3ep", "1dur", "5tok"):
        check_max_duration(t_max, state)
    check_max_duration("1ba", State(model=None))


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


def test_an_error_for_a_missing_package():
    """The error is an ImportError with the command to install."""
    with pytest.raises(ImportError, match="pip install transformers"):
        raise MissingConditionalImportError(extra_deps_group="nlp", conda_package="transformers")


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


def test_parts_of_lists():
    """The last part may be smaller; an empty list has no parts."""
    assert split_list([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert split_list([], 2) == []


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
    settings = Config.from_arguments(given, None)

    assert settings.fsdp.reshard_after_forward is reshards


def test_settings_of_tensor_parallelism(monkeypatch):
    """The other processes shard the model with FSDP2, and replicate it without."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    tp = TPConfig(tensor_parallel_degree=2, layer_plan={"*.in": "colwise"})

    sharded, replicated = (Config.from_arguments(ParallelismConfig(fsdp, tp), None) for fsdp in (FSDPConfig(), None))

    assert (sharded.mesh.tp, sharded.mesh.shard, sharded.tp.plan) == (2, 2, {"*.in": "colwise"})
    assert (replicated.mesh.tp, replicated.mesh.replicate, replicated.mesh.shard) == (2, 2, 1)


def test_names_of_nested_dictionaries():
    """The second argument is the beginning of the names; lists and mappings of other types are values."""
    nested = {"a": {"b": {"c": 1}, "d": {}}, "e": [{"f": 2}], "g": OrderedDict(h=3)}

    assert convert_nested_dict_to_flat_dict(nested) == {"a/b/c": 1, "e": [{"f": 2}], "g/h": 3}
    assert convert_nested_dict_to_flat_dict(nested, "p") == {"p/a/b/c": 1, "p/e": [{"f": 2}], "p/g/h": 3}


Pair = namedtuple("Pair", "one other")  # whose constructor takes no iterable


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (defaultdict(list, a=1), defaultdict(list, a=2)),
        (OrderedDict(a=1), OrderedDict(a=2)),
        (Counter(a=1), Counter(a=2)),
        (Pair(1, 2), Pair(2, 4)),
        ([1, 2], [2, 4]),
    ],
)
def test_map_collection(given, expected):
    """The result is of the same type, and a defaultdict keeps its default."""
    mapped = map_collection(given, lambda number: 2 * number)

    assert (mapped, type(mapped)) == (expected, type(expected))
    assert getattr(mapped, "default_factory", None) is getattr(expected, "default_factory", None)


@pytest.mark.parametrize(
    ("degree", "error", "reason"),
    [
        ("2", TypeError, "an int"),
        (1.5, TypeError, "an int"),
        (True, TypeError, "an int"),
        (0, ValueError, "at least 1"),
    ],
)
def test_degree_that_is_no_number_of_processes(degree, error, reason):
    """A wrong degree of tensor parallelism raises an error that names it."""
    with pytest.raises(error, match=rf"\['tensor_parallel_degree'\] must be {reason}.* that compute a layer together"):
        Config.from_arguments(ParallelismConfig(tp=TPConfig(tensor_parallel_degree=degree)), None)


def test_settings_that_are_assigned():
    """An assigned attribute changes the settings that the Trainer receives."""
    config, fsdp = ParallelismConfig(), FSDPConfig()
    config.fsdp = fsdp
    fsdp.sharding_strategy, fsdp.mixed_precision = "SHARD_GRAD_OP", "FULL"
    fsdp.state_dict_type = "sharded"

    assert Config.from_arguments(config, None).fsdp.reshard_after_forward is False
    assert config["fsdp"]["mixed_precision"] == "FULL"
    assert (config.fsdp, fsdp.state_dict_type) == (fsdp, "sharded")

    config.fsdp = None

    assert config == {}


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

    settings = Config.from_arguments({"fsdp": given}, None)

    assert (settings.mesh.replicate, settings.mesh.shard, settings.mesh.tp) == mesh
    assert settings.fsdp.reshard_after_forward is reshards


def test_replicas_with_split_layers(monkeypatch):
    """With tensor parallelism, the degrees are those of the other processes."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    fsdp, tp = FSDPConfig(data_parallel_replicate_degree=2), TPConfig(None, 2, {"*.in": "colwise"})

    mesh = Config.from_arguments(ParallelismConfig(fsdp, tp), None).mesh

    assert (mesh.replicate, mesh.shard, mesh.tp) == (2, 2, 2)


def test_replicas_on_machines_with_split_layers(monkeypatch):
    """A hybrid strategy shards over the processes of a machine that do not share a layer."""
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    config = ParallelismConfig(FSDPConfig("HYBRID_SHARD"), TPConfig(None, 2, {"*.in": "colwise"}))

    mesh = Config.from_arguments(config, None).mesh

    assert (mesh.replicate, mesh.shard, mesh.tp) == (2, 4, 2)


def test_defaults_of_fsdp():
    """Attributes that are not set have Composer's defaults."""
    config = FSDPConfig(mixed_precision="PURE")

    assert (config.sharding_strategy, config.mixed_precision, config.state_dict_type) == ("FULL_SHARD", "PURE", "full")
    assert config.activation_checkpointing is config.cpu_offload is False
    assert config.auto_wrap is config.use_orig_params is True
    assert not hasattr(config, "nothing")


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


@pytest.mark.parametrize(
    ("size", "is_automatic", "batch_size", "expected"),
    [(None, False, 4, 4), ("auto", True, 4, 4), (2, False, 4, 2), (2, False, None, 2)],
)
def test_initial_microbatch_sizes(size, is_automatic, batch_size, expected):
    """A size that is not given, or is to be found, is that of the batches."""
    loader = None if batch_size is None else DataLoader([1, 2], batch_size=batch_size)

    assert initial_microbatch_size(size, is_automatic, loader) == expected


def test_the_initial_microbatch_size_is_unknown():
    """A loader without a batch size needs one; without a loader nothing is known yet."""
    assert initial_microbatch_size(None, False, None) is None
    with pytest.raises(ValueError, match="device_train_microbatch_size must be given"):
        initial_microbatch_size(None, False, [1, 2])


def test_nested_and_flat_dictionaries():
    """The two functions are inverse to each other."""
    nested = {"run": {"name": "mine", "sizes": {"batch": 2}}, "seed": 17}

    assert convert_flat_dict_to_nested_dict(convert_nested_dict_to_flat_dict(nested)) == nested

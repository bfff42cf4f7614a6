"""Functions that only serve former names."""

import pytest
import torch

from composer.callbacks import CheckpointSaver
from composer.compat.replacements import (
    DeviceCPU,
    DeviceGPU,
    DeviceMPS,
    create_interval_scheduler,
    ensure_tuple,
    get_device,
    is_model_ddp,
)
from composer.core import Event, State, Timestamp
from fixtures import small_run


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, ()), (3, (3,)), ("ab", ("ab",)), (b"ab", (b"ab",)), ([1, 2], (1, 2)), ((), ()), ({"a": 1}, (1,))],
)
def test_ensure_tuple(given, expected):
    """Sequences and values of mappings become tuples; anything else is one item."""
    assert ensure_tuple(given) == expected


def test_devices_are_torch_devices():
    """The device of the CPU is torch's, and devices that do not exist here raise an error."""
    assert get_device("cpu") == DeviceCPU() == torch.device("cpu")
    assert isinstance(get_device(), torch.device)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cannot be used here"):
            DeviceGPU()
    if not torch.backends.mps.is_available():
        with pytest.raises(ValueError, match="cannot be used here"):
            DeviceMPS()


@pytest.mark.parametrize(
    ("interval", "options", "duration", "expected"),
    [
        ("2ba", {}, "1ep", ["ep0-ba2", "ep0-ba4", "ep1-ba5"]),
        ("2ba", {"include_end_of_training": False}, "1ep", ["ep0-ba2", "ep0-ba4"]),
        (1, {}, "2ep", ["ep1-ba5", "ep2-ba10"]),
        ("4ba", {}, "6ba", ["ep0-ba4", "ep1-ba6"]),
    ],
)
def test_interval_schedulers(tmp_path, interval, options, duration, expected):
    """A schedule is due at each interval, and once at the end of the training; a CheckpointSaver accepts it."""
    saver = CheckpointSaver(str(tmp_path), save_interval=create_interval_scheduler(interval, **options))

    with small_run(max_duration=duration, callbacks=saver) as trainer:
        trainer.fit()

    assert sorted(path.name for path in tmp_path.glob("ep*")) == expected


def test_interval_schedulers_for_ends():
    """With checkpoint_events=False, a schedule is for BATCH_END and EPOCH_END."""
    is_due = create_interval_scheduler("2ba", checkpoint_events=False)
    state = State(model=None)
    state.previous_timestamp, state.timestamp = Timestamp(batch=1), Timestamp(batch=2)

    assert is_due(state, Event.BATCH_END)
    assert not is_due(state, Event.BATCH_CHECKPOINT)


@pytest.mark.parametrize(
    ("final_events", "expected"),
    [
        (None, [Event.BATCH_CHECKPOINT]),
        ({Event.FIT_END}, [Event.FIT_END]),
        ({"epoch_checkpoint"}, ["epoch_checkpoint"]),
    ],
)
def test_interval_schedulers_with_final_events(final_events, expected):
    """At the end of the training a schedule is due at the final events, and there only."""
    is_due = create_interval_scheduler("3ba", final_events=final_events)
    state = State(model=None, max_duration="4ba")
    state.previous_timestamp, state.timestamp = Timestamp(batch=3), Timestamp(batch=4)

    assert [event for event in Event if is_due(state, event)] == expected


def test_models_are_not_wrapped():
    """The model of a state is not in a DistributedDataParallel."""
    assert not is_model_ddp(small_run().state.model)

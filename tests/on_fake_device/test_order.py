"""The order of copies and waits, where the code relies on a rule of CUDA: what is read too early is zero here."""

import time

import pytest
import torch
from safetensors.torch import load, load_file
from torch import nn

import composer.algorithms as al
import composer.callbacks
from composer import Callback
from composer import functional as cf
from composer.callbacks import NaNMonitor
from composer.checkpoint.layout import describe_tensors, pack_files, plan_files
from composer.checkpoint.manifest import MODEL
from composer.core import State
from composer.core.data.batches import move_batch
from composer.functional.random import send
from composer.loggers import InMemoryLogger
from fixtures import make_classifier, small_run
from on_fake_device.guards import ordered

COPIES = ("copy_to_pinned", "copy_to_pageable", "copy_from_pinned", "copy_from_pageable", "copy_on_device")
WAITS = ("wait_for_stream", "wait_for_event", "wait_for_device")


@pytest.fixture(params=["default stream", "another stream"])
def stream(request):
    """Make a stream the current one, as a program may do around all of its training, and return its number."""
    chosen = torch.cuda.default_stream() if request.param == "default stream" else torch.cuda.Stream()
    with torch.cuda.stream(chosen):
        yield chosen.cuda_stream


@pytest.fixture
def calls(stream):
    """Delay copies, and return the calls of the runtime."""
    with ordered() as calls:
        yield calls


def on_device(*numbers):
    """Return numbers on the device, to which they have been copied."""
    values = torch.tensor(numbers).cuda()
    torch.cuda.synchronize()
    return values


class Weights(Callback):
    """Sets the weights at the start of each batch, in place of kernels, to the number of the batch."""

    def batch_start(self, state, logger):
        for weight in state.model.parameters():
            weight.data.copy_(torch.full_like(weight, float(state.timestamp.batch) + 1, device="cpu"))


class TestSave:
    """Copies of a save: all to pinned memory, then one wait."""

    def pack(self, tensors, memory):
        """Return the content of a file of tensors."""
        described = describe_tensors({MODEL: tensors}, is_first=True)
        _, [writes] = plan_files([described])
        [pieces] = pack_files({MODEL: tensors}, writes, copy=True, memory=memory).values()
        return b"".join(pieces)

    def test_waits_once_after_all_copies(self, calls, stream):
        """The host waits once, for the stream of the copies, and only then reads them."""
        tensors, memory = {"one": on_device(1.0, 2.0), "two": on_device(3.0), "three": on_device(4)}, {}
        start = len(calls())

        content = self.pack(tensors, memory)

        made = [call for call in calls()[start:] if call[0] in COPIES + WAITS]
        assert made == [*[("copy_to_pinned", stream, 0)] * 3, ("wait_for_stream", stream, 0)]
        assert {name: one.tolist() for name, one in load(content).items()} == {"one": [1, 2], "two": [3], "three": [4]}

    def test_next_step_does_not_change_it(self, calls):
        """What the host requests later comes after the copies, and the next save fills the same memory again."""
        weight, memory = on_device(1.0, 2.0), {}
        first = self.pack({"weight": weight}, memory)
        places = {tensor.data_ptr() for tensor in memory.values()}
        weight.copy_(torch.tensor([5.0, 6.0]))

        second = self.pack({"weight": weight}, memory)

        assert [load(one)["weight"].tolist() for one in (first, second)] == [[1, 2], [5, 6]]
        assert {tensor.data_ptr() for tensor in memory.values()} == places

    def test_memory_is_filled_again_after_the_files_are_written(self, calls, tmp_path, before_each_file):
        """Each checkpoint has the weights of its batch, although it is written while the next batch is computed."""
        before_each_file(lambda: time.sleep(0.1))  # longer than a batch
        options = {"save_folder": str(tmp_path), "save_interval": "1ba", "max_duration": "3ba"}

        with small_run(device="gpu", precision="fp32", callbacks=Weights(), **options) as run:
            run.fit()

        for batch in (1, 2, 3):
            saved = load_file(tmp_path / f"ep{batch // 5}-ba{batch}" / MODEL)
            assert {number for one in saved.values() for number in one.flatten().tolist()} == {batch}


class TestCopiesToTheDevice:
    """Copies from pinned memory, for which the host does not wait."""

    @pytest.mark.parametrize("move", [move_batch, send], ids=["move_batch", "send"])
    def test_memory_is_not_reused_before_the_copy(self, calls, stream, move):
        """Torch reuses pinned memory only after the event that it records behind the copy."""
        source = torch.tensor([1.0, 2.0]).pin_memory()
        start = len(calls())

        moved = move(source, torch.device("cuda"))
        del source
        others = [torch.full((2,), 9.0).pin_memory() for _ in range(8)]

        names = [(name, one) for name, one, _ in calls()[start:] if name in (*COPIES, *WAITS)]
        assert names == [("copy_from_pinned", stream)]
        assert moved.tolist() == [1, 2]
        assert all(other.tolist() == [9, 9] for other in others)


def test_averages_on_the_host_wait_for_the_copies(calls):
    """Weights of the device are averaged on the CPU after one wait for all of them."""
    averages, weights = [torch.zeros(2), torch.zeros(1)], [on_device(1.0, 2.0), on_device(3.0)]
    start = len(calls())

    cf.update_averages(averages, weights, smoothing=0.5)

    assert [average.tolist() for average in averages] == [[0.5, 1], [1.5]]
    made = [name for name, *_ in calls()[start:] if name in COPIES + WAITS]
    assert made == ["copy_to_pinned", "copy_to_pinned", "wait_for_device"]


def test_averages_on_the_device_wait_for_the_copies(calls):
    """Weights of the CPU in pinned memory may be changed as soon as the averages of the device are updated."""
    averages, weights = [on_device(0.0, 0.0)], [torch.tensor([1.0, 2.0]).pin_memory()]
    start = len(calls())

    cf.update_averages(averages, weights, smoothing=0.5)

    made = [name for name, *_ in calls()[start:] if name in (*COPIES, *WAITS, "kernel")]
    assert made == ["copy_from_pinned", "wait_for_device", "kernel"]


class TestNaNMonitor:
    def test_reads_after_the_event(self, calls, stream):
        """A check starts a copy and records an event behind it; the next check waits for this event, and reads."""
        monitor, state = NaNMonitor(every="1ba"), State(model=None)
        state.loss = on_device(float("nan"))[0]
        start = len(calls())
        monitor.after_loss(state, None)
        monitor.batch_end(state, None)
        checked = len(calls())

        with pytest.raises(RuntimeError, match="not a number"):
            monitor.batch_end(state, None)

        first, second = calls()[start:checked], calls()[checked:]
        assert [call for call in first if call[0] in WAITS] == []
        [copied] = [place for place, call in enumerate(first) if call == ("copy_to_pinned", stream, 0)]
        [*_, (_, event, of_stream)] = [call for call in first[copied:] if call[0] == "record"]
        assert of_stream == stream
        assert [call for call in second if call[0] in WAITS] == [("wait_for_event", event, 0)]


def test_all_work_is_in_the_current_stream(calls, stream, tmp_path):
    """No memory is used in a second stream, which would need ``record_stream``: torch reuses it in its own stream."""
    model = make_classifier(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    algorithms = [
        al.EMA("1ba"),
        al.PostHocEMA(tmp_path / "averages", "1ba"),
        al.GradientClipping("norm", 1.0),
        al.MixUp(),
    ]
    callbacks = [
        NaNMonitor(every="1ba"),
        *(getattr(composer.callbacks, name)() for name in ("OptimizerMonitor", "MemoryMonitor", "SpeedMonitor")),
        composer.callbacks.ActivationMonitor(interval="1ba", only_log_wandb=False),
    ]
    options = {"save_folder": str(tmp_path), "save_interval": "2ba", "max_duration": "1ep", "device": "gpu"}

    with small_run(
        model=model,
        optimizers=optimizer,
        algorithms=algorithms,
        callbacks=callbacks,
        loggers=InMemoryLogger(),
        precision="amp_fp16",
        **options,
    ) as run:
        run.fit()

    streams = {one for name, one, _ in calls("kernel", "wait_for_stream", *COPIES)}
    assert streams == {stream}
    assert {other for _, _, other in calls("record")} <= {stream}
    assert calls("stream_waits") == []

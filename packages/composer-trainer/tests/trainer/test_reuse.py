"""A reused callback or logger works like a new one."""

import io
import json
import time
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import composer.callbacks
import composer.loggers
from composer.callbacks import (
    ActivationMonitor,
    CheckpointSaver,
    CostMonitor,
    EarlyStopper,
    ExportForInferenceCallback,
    FreeOutputs,
    GarbageCollector,
    Generate,
    GradientNoiseScale,
    GradualUnfreezing,
    ImageVisualizer,
    LoadCheckpoint,
    LRMonitor,
    MemoryMonitor,
    MemorySnapshot,
    NaNMonitor,
    OOMObserver,
    OptimizerMonitor,
    RuntimeEstimator,
    SavePretrained,
    SpeedMonitor,
    SystemMetricsMonitor,
    ThresholdStopper,
)
from composer.core import Callback, LoggerDestination
from composer.loggers import (
    AimLogger,
    CometMLLogger,
    ConsoleLogger,
    FileLogger,
    InMemoryLogger,
    MLFlowLogger,
    NeptuneLogger,
    ProgressBarLogger,
    SlackLogger,
    SwanLabLogger,
    TensorboardLogger,
    TrackioLogger,
    WandBLogger,
)
from composer.models import ComposerClassifier
from fixtures import small_run

pytestmark = pytest.mark.filterwarnings("ignore:.*memory of CUDA devices", "ignore:.*CUDA's allocator")


def nothing(component):
    return {}


@attrs.frozen
class Case:
    """How a component is created in a folder, and what is compared besides its logs."""

    make: object
    look: object = nothing
    names_only: bool = False
    broken_off_at: int = 2
    """The batch in which its first run may end by an error."""
    goes_on: bool = False
    """Whether it continues in a second fit of the same Trainer."""


CALLBACKS = {
    ActivationMonitor: Case(lambda folder: ActivationMonitor("3ba", only_log_wandb=False)),
    CheckpointSaver: Case(
        lambda folder: CheckpointSaver(f"{folder}/{{run_name}}", overwrite=True),
        lambda one: {"saved": tuple(Path(path).name for path in one.saved_checkpoints)},
    ),
    CostMonitor: Case(
        lambda folder: CostMonitor(),
        lambda one: {"calls": {(cost.component, cost.event): cost.calls for cost in one.table()}},
        goes_on=True,
    ),
    EarlyStopper: Case(
        lambda folder: EarlyStopper("MulticlassAccuracy", "eval"), lambda one: {"end": (one.best, one.stopped_at)}
    ),
    ExportForInferenceCallback: Case(lambda folder: ExportForInferenceCallback("torchexport", f"{folder}/model.pt2")),
    FreeOutputs: Case(lambda folder: FreeOutputs()),
    GarbageCollector: Case(lambda folder: GarbageCollector("2ba")),
    Generate: Case(lambda folder: Generate(["a"], "100ba")),
    GradientNoiseScale: Case(lambda folder: GradientNoiseScale(batch_log_interval=2)),
    GradualUnfreezing: Case(lambda folder: GradualUnfreezing()),
    ImageVisualizer: Case(lambda folder: ImageVisualizer("3ba")),
    LRMonitor: Case(lambda folder: LRMonitor()),
    LoadCheckpoint: Case(
        lambda folder: LoadCheckpoint(folder / "weights.safetensors", load_weights_only=True), goes_on=True
    ),
    MemoryMonitor: Case(lambda folder: MemoryMonitor()),
    MemorySnapshot: Case(lambda folder: MemorySnapshot()),
    NaNMonitor: Case(lambda folder: NaNMonitor()),
    OOMObserver: Case(lambda folder: OOMObserver()),
    OptimizerMonitor: Case(lambda folder: OptimizerMonitor(batch_log_interval=2)),
    RuntimeEstimator: Case(lambda folder: RuntimeEstimator()),
    SavePretrained: Case(lambda folder: SavePretrained(f"{folder}/{{run_name}}/{{batch}}", "2ba")),
    SpeedMonitor: Case(lambda folder: SpeedMonitor(count_flops=True)),
    SystemMetricsMonitor: Case(lambda folder: SystemMetricsMonitor(every="1ba"), names_only=True),
    ThresholdStopper: Case(
        lambda folder: ThresholdStopper("MulticlassAccuracy", "eval", threshold=0.99),
        lambda one: {"end": (one.last, one.stopped_at)},
        broken_off_at=1,
    ),
}


def file_of(logger):
    lines = [json.loads(line) for line in logger.path.read_text().splitlines()]
    return {"lines": [line["metrics"] for line in lines if "metrics" in line], "begins": set(lines[0])}


def _make_tracker(logger, product, *arguments):
    pytest.importorskip(product, reason="nox -s trackers installs it")
    return logger(*arguments)


def stored(logger):
    return {"stored": list(logger.stored)}


LOGGERS = {
    AimLogger: Case(lambda folder: _make_tracker(AimLogger, "aim"), stored),
    CometMLLogger: Case(lambda folder: CometMLLogger(exp_kwargs={"online": False}), stored),
    ConsoleLogger: Case(
        lambda folder: ConsoleLogger("4ba", stream=io.StringIO()),
        lambda one: {"lines": [line for line in one.stream.getvalue().splitlines() if "loss/" in line]},
    ),
    FileLogger: Case(lambda folder: FileLogger(f"{folder}/{{run_name}}.txt", capture_stdout=False), file_of),
    InMemoryLogger: Case(
        lambda folder: InMemoryLogger(),
        lambda one: {name: [(int(clock.batch), value) for clock, value in values] for name, values in one.data.items()},
    ),
    MLFlowLogger: Case(lambda folder: MLFlowLogger(log_system_metrics=False), stored),
    NeptuneLogger: Case(lambda folder: NeptuneLogger(mode="offline"), stored),
    ProgressBarLogger: Case(lambda folder: ProgressBarLogger(stream=io.StringIO())),
    SlackLogger: Case(lambda folder: SlackLogger("loss/*", slack_logging_api_key="x", channel_id="C"), stored),
    SwanLabLogger: Case(lambda folder: _make_tracker(SwanLabLogger, "swanlab"), stored),
    TensorboardLogger: Case(lambda folder: TensorboardLogger(f"{folder}/runs"), stored),
    TrackioLogger: Case(lambda folder: _make_tracker(TrackioLogger, "trackio", "digits"), stored),
    WandBLogger: Case(lambda folder: WandBLogger(), stored),
}
TRACKERS = (
    AimLogger,
    CometMLLogger,
    MLFlowLogger,
    NeptuneLogger,
    SwanLabLogger,
    TensorboardLogger,
    TrackioLogger,
    WandBLogger,
)
COMPONENTS = {**CALLBACKS, **LOGGERS}


class Recorder(LoggerDestination):
    """Stores a run's logs; with ``names_only`` only the metrics' names."""

    def __init__(self, names_only=False):
        self.entries, self.names_only = [], names_only

    def log_metrics(self, metrics, step=None):
        if self.names_only:
            self.entries += metrics
        else:
            self.entries += [(step, name, _to_data(value)) for name, value in metrics.items()]

    def log_table(self, columns, rows, name="Table", step=None):
        self.entries.append((step, name, [list(row) for row in rows]))

    def log_images(self, images, name="Images", channels_last=False, step=None, **details):
        self.entries.append((step, name, _to_data(images.sum())))


def _to_data(value):
    return value.item() if isinstance(value, torch.Tensor) else value


class Probe(Callback):
    """Records a progress bar at an epoch's start, and waits until a thread has measured the machine."""

    def __init__(self, component):
        self.component, self.shown = component, []

    def epoch_start(self, state, logger):
        if isinstance(self.component, ProgressBarLogger):
            self.shown.append(self.component._values(state, best=True))

    def batch_start(self, state, logger):
        until = time.monotonic() + 5
        while isinstance(self.component, SystemMetricsMonitor) and time.monotonic() < until:
            if self.component._sampler._latest:
                return
            time.sleep(0.01)


class Model(ComposerClassifier):
    """A linear image classifier that is always right, or as the seed determines."""

    def __init__(self, is_right):
        network = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
        torch.manual_seed(1)
        nn.init.normal_(network[1].weight)
        nn.init.zeros_(network[1].bias)
        if is_right:
            nn.init.eye_(network[1].weight)
        super().__init__(network, num_classes=3, train_metrics=[])

    class tokenizer:
        def __new__(cls, prompts, **options):
            return {"input_ids": torch.ones(len(prompts), 2), "attention_mask": torch.ones(len(prompts), 2)}

        @staticmethod
        def batch_decode(ids, **options):
            return [str(row.tolist()) for row in ids]

    def generate(self, input_ids, **options):
        return torch.cat([input_ids, 2 * input_ids], dim=1)

    def save_pretrained(self, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)

    def get_metadata(self):
        return {}


def make_data(seed):
    images = torch.randn(8, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
    return [(part, part.flatten(1)[:, :3].argmax(dim=1)) for part in images.split(4)]


@pytest.fixture
def make_run(monkeypatch, clock):
    """Return a function that creates a trainer whose steps change nothing, with records of its component."""
    clock.step = 1.0  # with each reading, so that measurements are the same each time
    monkeypatch.setattr("composer.callbacks.export_for_inference.export_for_inference", _note_sample)
    for tracker in TRACKERS:
        _make_storable(monkeypatch, tracker)
    monkeypatch.setattr("slack_sdk.WebClient.chat_postMessage", _post)

    def make(component, *, is_first=False, other_data=False):
        case = COMPONENTS[type(component)]
        recorder, probe = Recorder(case.names_only), Probe(component)
        model, data = Model(is_right=is_first), make_data(1 if other_data else 0)
        is_logger = isinstance(component, LoggerDestination)
        exported.clear()
        posted.clear()
        trainer = small_run(
            model=model,
            train_dataloader=data,
            eval_dataloader=data,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
            max_duration="3ep",
            device_train_microbatch_size=2,
            callbacks=[probe] if is_logger else [component, probe],
            loggers=[component, recorder] if is_logger else [recorder],
            run_name="first" if is_first else "second",
        )
        return trainer, recorder, probe

    return make


exported, posted = [], []


def _note_sample(model, save_format, save_path, *, sample_input, **options):
    exported.append(sample_input[0].sum().item())


def _post(client, *, channel, text):
    posted.append(text)


def _write_weights(path):
    save_file(Model(is_right=True).state_dict(), path)


def _make_storable(monkeypatch, tracker):
    """Let a tracker store a run's records in a list."""

    def open_run(self, state):
        assert self.run_id is None
        self.run_id, self.stored = self.choose_run_id(state.run_name), []

    def write_metrics(self, records):
        self.stored += [(record.step, dict(record.metrics)) for record in records]

    monkeypatch.setattr(tracker, "open_run", open_run)
    monkeypatch.setattr(tracker, "write_metrics", write_metrics)
    for method in ("write_hyperparameters", "write_table", "write_images", "close_run"):
        monkeypatch.setattr(tracker, method, lambda self, *arguments: None)


def look(component, recorder, probe):
    """Return all records of a component in a run."""
    case = COMPONENTS[type(component)]
    if isinstance(component, SlackLogger):
        component.close(None, None)  # waits for the thread that sends; the next message starts another
    own = {"posted": list(posted)} if isinstance(component, SlackLogger) else case.look(component)
    return {"logged": list(recorder.entries), "shown": list(probe.shown), "exported": list(exported), **own}


def since(before, now):
    """Return the records after an earlier look."""
    return {name: one[len(before.get(name, [])) :] if isinstance(one, list) else one for name, one in now.items()}


def abort_at(trainer, batch):
    """Raise an error between two events of a batch."""

    def fail(state, logger):
        if state.timestamp.batch == batch:
            raise RuntimeError("broken off")

    trainer.engine.on("after_train_batch", fail)
    with pytest.raises(RuntimeError, match="broken off"):
        trainer.fit()


def expected_of(kind, make_run, folder):
    """Return the records of a new component."""
    new = COMPONENTS[kind].make(folder / "new")
    trainer, *observers = make_run(new)
    trainer.fit()
    trainer.close()
    return look(new, *observers)


@pytest.fixture
def folder(tmp_path):
    """Return a folder with weights at each path that a component may load from."""
    for place in ("new", "used"):
        (tmp_path / place).mkdir()
        _write_weights(tmp_path / place / "weights.safetensors")
    return tmp_path


@pytest.mark.parametrize("is_broken_off", [False, True], ids=["ended", "broken off"])
@pytest.mark.parametrize("kind", COMPONENTS)
def test_in_a_second_trainer(kind, is_broken_off, make_run, folder):
    """After a completed or aborted run, a component works in a second trainer like a new one."""
    expected = expected_of(kind, make_run, folder)
    used = COMPONENTS[kind].make(folder / "used")
    first, *observers = make_run(used, is_first=True, other_data=True)
    abort_at(first, COMPONENTS[kind].broken_off_at) if is_broken_off else first.fit()
    first.close()
    before = {"lines": look(used, *observers)["lines"]} if isinstance(used, ConsoleLogger) else {}

    second, *observers = make_run(used)
    second.fit()
    second.close()

    assert since(before, look(used, *observers)) == expected


@pytest.mark.parametrize("kind", [FileLogger, *TRACKERS])
def test_logger_of_an_open_run_raises(kind, make_run, folder):
    """A logger that another run still uses raises."""
    used = COMPONENTS[kind].make(folder / "used")
    make_run(used, is_first=True)

    with pytest.raises(RuntimeError, match=f"{kind.__name__} is used by another run that is not closed"):
        make_run(used)


def test_every_callback_and_logger_is_tested():
    """A component that is missing from the table fails here."""
    public = {getattr(module, name) for module in (composer.callbacks, composer.loggers) for name in module.__all__}
    kinds = {one for one in public if issubclass(one, Callback)} - {Callback, LoggerDestination}

    assert kinds == set(COMPONENTS)

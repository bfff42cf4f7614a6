"""The recipe with all four packages: reproducible results, the documented order of events, no stale parameters."""

import re
import subprocess
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Event, Trainer
from composer.algorithms import EMA, BlurPool, ChannelsLast, LabelSmoothing, MixUp
from composer.callbacks import LRMonitor, SpeedMonitor
from composer.loggers import ConsoleLogger, FileLogger, InMemoryLogger
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler
from composer.trainer.reproducibility import seed_all


def make_data():
    """Return a loader of 256 real images and one of 64 others."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels[:320], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    classes = torch.tensor(labels[:320])
    train, test = TensorDataset(images[:256], classes[:256]), TensorDataset(images[256:], classes[256:])
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64)


def make_network():
    """Return a small network with dropout, which draws from torch's global generator."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def make_recipe():
    """Return the quick start's algorithms."""
    return [BlurPool(), LabelSmoothing(0.1), MixUp(0.2), EMA("5ba"), ChannelsLast()]


def train(algorithms=None, seed=3, **options):
    """Train two epochs with an evaluation after each and return the trainer."""
    seed_all(seed)
    model = ComposerClassifier(make_network(), num_classes=10)
    train_loader, test_loader = make_data()
    settings = {
        "model": model,
        "train_dataloader": train_loader,
        "eval_dataloader": test_loader,
        "optimizers": torch.optim.AdamW(model.parameters(), lr=0.01),
        "schedulers": CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur"),
        "algorithms": make_recipe() if algorithms is None else algorithms,
        "max_duration": "2ep",
        "progress_bar": False,
        "device": "cpu",
        "seed": seed,
        **options,
    }
    with Trainer(**settings) as trainer:
        trainer.fit()
    return trainer


def bits(trainer):
    """Return every weight, buffer and average of a trained model."""
    tensors = dict(trainer.state.model.state_dict())
    for algorithm in trainer.state.algorithms:
        if isinstance(algorithm, EMA):
            averaged = algorithm.get_ema_model(trainer.state.model).state_dict()
            tensors |= {f"average of {name}": tensor for name, tensor in averaged.items()}
    return tensors


def assert_same_bits(first, second):
    """Check that all weights of two trained models are bit-identical."""
    first, second = bits(first), bits(second)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == []


class TestSameBits:
    def test_same_seed(self):
        """Two runs of one seed give equal weights and averages."""
        assert_same_bits(train(), train())

    def test_other_seed(self):
        """Another seed gives other weights, so the comparison can fail."""
        first, second = bits(train(seed=3)), bits(train(seed=4))

        assert any(not torch.equal(first[name], second[name]) for name in first)

    def test_observers_do_not_change_results(self, tmp_path, capsys):
        """Callbacks, all loggers, a progress bar and traces do not change the weights."""
        watched = train(
            callbacks=[LRMonitor(), SpeedMonitor(window_size=2)],
            loggers=[InMemoryLogger(), FileLogger(str(tmp_path / "log.jsonl")), ConsoleLogger("1ba", stream="stdout")],
            progress_bar=True,
            log_traces=True,
        )

        assert_same_bits(train(), watched)
        assert capsys.readouterr().out

    def test_order_of_the_list_makes_no_difference(self):
        """The engine orders algorithms of different stages, independent of the list."""
        assert_same_bits(train(), train(algorithms=make_recipe()[::-1]))


class TestRecipe:
    def test_every_parameter_is_trained(self):
        """After surgery the optimizer has the model's parameters, and each of them changes in training."""
        seed_all(3)
        before = ComposerClassifier(make_network(), num_classes=10).state_dict()

        trainer = train()

        owned = {id(parameter) for group in trainer.state.optimizers[0].param_groups for parameter in group["params"]}
        parameters = dict(trainer.state.model.named_parameters())
        assert owned == {id(parameter) for parameter in parameters.values()}
        unchanged = [
            name for name, parameter in parameters.items() if name in before and torch.equal(before[name], parameter)
        ]
        assert unchanged == []

    def test_learns(self):
        """On 256 images, the accuracy of the recipe is much higher than chance, which is 0.1."""
        trainer = train(max_duration="15ep", eval_interval="15ep")

        assert trainer.state.eval_metric_values["MulticlassAccuracy"] > 0.4

    def test_evaluation_uses_the_average_and_restores_the_weights(self):
        """During an evaluation the model has the averages; afterwards its training weights are restored exactly."""
        inside, outside = [], []

        class Observer(Callback):
            def eval_batch_start(self, state, logger):
                inside.append(state.model.module[-1].weight.detach().clone())

            def eval_before_all(self, state, logger):
                outside.append(state.model.module[-1].weight.detach().clone())

            def eval_after_all(self, state, logger):
                outside.append(state.model.module[-1].weight.detach().clone())

        trainer = train(callbacks=Observer())

        average = trainer.state.algorithms[3].get_ema_model(trainer.state.model)
        assert torch.equal(inside[-1], average.module[-1].weight)
        assert torch.equal(outside[-2], outside[-1])
        assert not torch.equal(inside[-1], outside[-1])

    def test_plan_reads_as_it_runs(self):
        """The plan's order is the order of the calls."""
        trainer = train()

        plan = trainer.engine.explain().to_dict()["events"]

        assert [entry["name"] for entry in plan["init"]] == ["BlurPool", "ChannelsLast"]
        assert [entry["name"] for entry in plan["before_loss"]] == ["MixUp", "LabelSmoothing"]
        assert [entry["name"] for entry in plan["batch_end"]] == ["EMA"]


class Recorder(Callback):
    """Records the name of every event."""

    def __init__(self):
        self.events = []

    def run_event(self, event, state, logger):
        self.events.append(event.value)


def diagram_events(diagram):
    """Return the events of a diagram in the docstring of Event, in order."""
    return [name.lower() for name in re.findall(r"<([A-Z_]+)>", diagram)]


class TestDiagram:
    def test_training_matches_the_diagram(self):
        """One epoch of one batch without evaluations runs the events of the diagram once, in order."""
        recorder = Recorder()
        train(callbacks=recorder, max_duration="1ep", train_subset_num_batches=1, eval_dataloader=None)
        training, _, _ = re.split(r"An evaluation|A prediction", Event.__doc__)

        assert recorder.events == diagram_events(training)

    def test_evaluation_matches_the_diagram(self):
        """A standalone evaluation runs the events of the diagram once."""
        recorder, model = Recorder(), ComposerClassifier(make_network(), num_classes=10)
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            eval_dataloader=make_data()[1],
            callbacks=recorder,
            progress_bar=False,
            device="cpu",
        )
        del recorder.events[:]
        _, evaluation, _ = re.split(r"An evaluation|A prediction", Event.__doc__)

        trainer.eval()

        assert recorder.events == diagram_events(evaluation)

    def test_evaluations_come_between_the_end_and_the_checkpoint(self):
        """In training, evaluations run after BATCH_END and EPOCH_END, as in the diagram."""
        recorder = Recorder()
        train(callbacks=recorder, max_duration="1ep", train_subset_num_batches=1, eval_interval="1ba")

        events = recorder.events
        start, end = events.index("eval_before_all"), events.index("eval_after_all")
        assert events[start - 1] == "batch_end"
        assert events[end + 1] == "batch_checkpoint"
        assert "eval_standalone_start" not in events


PROGRAM = """
import hashlib, sys, warnings

warnings.simplefilter("error")
sys.path.insert(0, {folder!r})
import test_recipe

trainer = test_recipe.train(deterministic_mode=True)
digest = hashlib.sha256()
for name, tensor in sorted(test_recipe.bits(trainer).items()):
    digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
print(digest.hexdigest())
"""


def test_same_bits_in_two_processes():
    """In deterministic mode, two processes with one seed produce the same weights and averages."""
    program = PROGRAM.format(folder=str(Path(__file__).parent))

    # It takes more than 5 seconds: each process imports torch. They run at the same time.
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    digests = {process.communicate()[0] for process in processes}

    assert [process.returncode for process in processes] == [0, 0]
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64

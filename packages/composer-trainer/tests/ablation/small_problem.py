"""A problem that trains in milliseconds, without torchmetrics, which takes seconds to import."""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Algorithm, Event, Trainer
from composer.core import Stage


class Accuracy:
    def __init__(self, higher_is_better):
        self.higher_is_better = higher_is_better
        self.reset()

    def to(self, device):
        return self

    def reset(self):
        self.correct = self.count = 0

    def compute(self):
        return torch.tensor(self.correct / self.count)


class Classifier(nn.Module):
    def __init__(self, higher_is_better):
        super().__init__()
        self.higher_is_better = higher_is_better
        self.layer = nn.Linear(4, 3)
        self.bonus = 0.0

    def forward(self, batch):
        return self.layer(batch[0])

    def eval_forward(self, batch, outputs=None):
        return self(batch)

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train=False):
        return {} if is_train else {"Accuracy": Accuracy(self.higher_is_better)}

    def update_metric(self, batch, outputs, metric):
        metric.correct += (outputs.argmax(1) == batch[1]).sum().item() + self.bonus * len(batch[1])
        metric.count += len(batch[1])


def make_trainer(algorithms, seed, higher_is_better=True, **options):
    torch.manual_seed(seed)
    model = Classifier(higher_is_better)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(60, 4, generator=generator)
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    settings = {
        "train_dataloader": DataLoader(data, batch_size=20, shuffle=True),
        "eval_dataloader": DataLoader(data, batch_size=60),
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "max_duration": "3ep",
        "seed": seed,
        "progress_bar": False,
        "device": "cpu",
    }
    return Trainer(model=model, algorithms=algorithms, **settings | options)


def make_unseeded_trainer(algorithms, seed):
    trainer = make_trainer(algorithms, seed)
    with torch.no_grad():
        trainer.state.model.layer.weight.copy_(
            torch.frombuffer(bytearray(os.urandom(12)), dtype=torch.uint8).view(3, 4)
        )
    return trainer


SEEN = []
"""What each Draws received: the names of the run's algorithms, its seed, the batch and the numbers drawn."""


class Draws(Algorithm):
    """Draws numbers, and notes them with the batch."""

    runs_at = {Event.AFTER_DATALOADER: Stage.AUGMENT}

    def apply(self, event, state, logger):
        drawn = torch.rand(3, generator=state.generator(self))
        names = tuple(type(one).__name__ for one in state.algorithms)
        SEEN.append((names, state.rank_zero_seed, [part.tolist() for part in state.batch], drawn.tolist()))


class OtherDraws(Draws):
    """Draws other numbers before, and notes nothing."""

    runs_at = {Event.AFTER_DATALOADER: Stage.SELECT}

    def apply(self, event, state, logger):
        torch.rand(5, generator=state.generator(self))


BATCHES_LEFT = []
"""The number of batches of Slow after which the process is killed, if any."""


def run_slow_study(folder, *batches_left):
    """Run a study in this process, which is killed after some batches if their number is given."""
    BATCHES_LEFT[:] = batches_left
    from conftest import InThisProcess

    from composer.ablation import ablate

    algorithms = {"bonus": Bonus, "slow": lambda: Slow(0.02)}
    settings = {"folder": folder, "executor": InThisProcess(), "progress_bar": False}
    ablate(make_trainer, algorithms, metric="eval/Accuracy", arms=["each", "all"], seeds=3, **settings)


class Nothing(Algorithm):
    """Changes nothing."""

    runs_at = {Event.BATCH_END: Stage.WEIGHTS}

    def apply(self, event, state, logger):
        return None


class Bonus(Algorithm):
    """Raises the accuracy by 0.25."""

    runs_at = {Event.BATCH_END: Stage.WEIGHTS}

    def apply(self, event, state, logger):
        state.model.bonus = 0.25


SLEPT = {}
"""The seconds that Slow has taken by seed. A busy machine makes them longer than intended."""


class Slow(Algorithm):
    """Takes 50 ms a batch."""

    runs_at = {Event.BATCH_END: Stage.WEIGHTS}

    def __init__(self, seconds=0.05):
        self.seconds = seconds

    def apply(self, event, state, logger):
        if BATCHES_LEFT:
            BATCHES_LEFT[0] -= 1
            if not BATCHES_LEFT[0]:
                os.kill(os.getpid(), 9)
        began, seed = time.perf_counter(), state.rank_zero_seed
        time.sleep(self.seconds)
        SLEPT[seed] = SLEPT.get(seed, 0.0) + time.perf_counter() - began


class Broken(Algorithm):
    """Raises an error in the first batch."""

    runs_at = {Event.BATCH_END: Stage.WEIGHTS}

    def apply(self, event, state, logger):
        raise RuntimeError("no such luck")


class Killed(Algorithm):
    """Ends the process, as the system does when memory is used up."""

    runs_at = {Event.BATCH_END: Stage.WEIGHTS}

    def apply(self, event, state, logger):
        os.kill(os.getpid(), 9)


class NotANumber(Algorithm):
    """Makes the loss NaN."""

    runs_at = {Event.AFTER_LOSS: Stage.LOSS}

    def apply(self, event, state, logger):
        state.loss = state.loss * float("nan")

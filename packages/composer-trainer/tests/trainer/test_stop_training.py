"""A training that state.stop_training() ends anywhere continues as if it had not been stopped."""

import json

import pytest
import torch

from composer.callbacks import EarlyStopper
from composer.core import Callback
from fixtures import make_loader, small_run
from fixtures.processes import run_processes


class Evaluations(Callback):
    """Records the batches after which the model was evaluated."""

    def __init__(self):
        self.batches = []

    def eval_end(self, state, logger):
        self.batches.append(int(state.timestamp.batch))


def run(interval, stop=None, load_path=None, duration="6ep"):
    """Train until an early stopper ends it, or with a stop before, and return the trainer and its evaluations."""
    evaluations = Evaluations()
    trainer = small_run(
        eval_dataloader=make_loader(seed=3),
        eval_interval=interval,
        callbacks=[EarlyStopper("MulticlassAccuracy", "eval", patience=2), evaluations],
        max_duration=duration,
        load_path=load_path,
    )
    if stop is not None:
        trainer.engine.on("batch_end", lambda state, _: state.stop_training(), every=f"{stop}ba")
    trainer.fit()
    return trainer, evaluations.batches


@pytest.mark.parametrize("interval", ["4ba", "1ep", "0.2dur"])
@pytest.mark.parametrize("stop", [2, 5, 6, 8, 9])
def test_resume_is_exact(tmp_path, interval, stop):
    """The same evaluations, and thereby the same end, as without the stop."""
    expected, batches = run(interval)
    stopped, first = run(interval, stop)
    assert stopped.state.timestamp.batch == stop < expected.state.timestamp.batch
    path = stopped.save_checkpoint(str(tmp_path / "stopped"))

    resumed, second = run(interval, load_path=path)

    assert first + second == batches
    assert resumed.state.timestamp.batch == expected.state.timestamp.batch
    pairs = zip(resumed.state.model.parameters(), expected.state.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_stop_at_the_end():
    """A training that is stopped at its planned end is evaluated there."""
    _, batches = run("10ep", stop=5, duration="5ba")

    assert batches == [5]


PROGRAM = """
import json, torch
from composer import Trainer
from composer.callbacks import EarlyStopper
from composer.distributed import get_global_rank, get_sampler
from composer.models import ComposerClassifier

data = torch.utils.data.TensorDataset(torch.randn(160, 4), torch.arange(160) % 3)
loader = torch.utils.data.DataLoader(data, 4, sampler=get_sampler(data))
found = {}

def run(name, event, ranks, **options):
    torch.manual_seed(0)
    model = ComposerClassifier(torch.nn.Linear(4, 3), 3)
    trainer = Trainer(
        model=model, train_dataloader=loader, optimizers=torch.optim.SGD(model.parameters(), 0.1), seed=1,
        max_duration="1000ep", progress_bar=False, device="cpu", dist_timeout=30.0, **options,
    )
    if event is not None:
        def stop(state, logger):
            if get_global_rank() in ranks and state.timestamp.batch >= 3:
                state.stop_training()
        trainer.engine.on(event, stop)
    result = trainer.fit()
    found[name] = int(trainer.state.timestamp.batch), result.reason.partition(";")[0], trainer.fit().steps

evaluation = {"eval_dataloader": loader, "eval_interval": "7ba"}
run("batch end", "batch_end", [1])
run("before the step", "before_train_batch", [0])
run("epoch end", "epoch_end", [1])
run("checkpoint", "epoch_checkpoint", [0])
run("evaluation", "eval_end", [1], **evaluation)
run("both", "batch_end", [0, 1])
run("early", None, [], callbacks=EarlyStopper("MulticlassAccuracy", "eval", patience=0), **evaluation)
print(json.dumps(found))
"""


def test_stop_in_one_of_two_processes(tmp_path):
    """All processes end after the same batch: at the end of an epoch or evaluation at once, else with an exchange."""
    (tmp_path / "program.py").write_text(PROGRAM)

    one, other = (json.loads(text.splitlines()[-1]) for text in run_processes(tmp_path / "program.py", 2))

    assert {name: batch for name, (batch, *_) in one.items()} == {name: batch for name, (batch, *_) in other.items()}
    assert [one[name][0] for name in ("epoch end", "checkpoint", "evaluation")] == [20, 20, 7]
    assert 3 < one["batch end"][0] < 10_000
    assert one["batch end"][1] == "another process called state.stop_training()"
    assert one["early"][0] % 7 == 0
    assert all(steps == 0 for *_, steps in [*one.values(), *other.values()])

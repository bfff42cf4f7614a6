"""Learning rates per batch."""

import pytest
import torch

from composer import Trainer
from composer.callbacks import LRMonitor
from composer.core import Engine, Logger, State
from composer.functional import SAMOptimizer
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from composer.optim import DecoupledAdamW, DecoupledSGDW, LinearScheduler


def parameter():
    return torch.nn.Parameter(torch.zeros(1))


def logged(*optimizers):
    """Return the values logged at the start of a batch."""
    state = State(model=None, optimizers=optimizers, callbacks=LRMonitor())
    history = InMemoryLogger()
    engine = Engine(state, Logger(state, history))
    engine.run_event("init")
    engine.run_event("batch_start")
    return history.most_recent_values


class TestLRMonitor:
    def test_each_group_has_a_name(self):
        """Groups are numbered within their optimizer."""
        groups = [{"params": [parameter()]}, {"params": [parameter()], "lr": 0.01}]

        assert logged(torch.optim.SGD(groups, lr=0.1)) == {"lr-SGD/group0": 0.1, "lr-SGD/group1": 0.01}

    def test_names_of_decoupled_optimizers(self):
        """Dashboards depend on these names."""
        optimizers = [DecoupledSGDW([parameter()], lr=0.1), DecoupledAdamW([parameter()], lr=0.2)]

        assert logged(*optimizers) == {"lr-DecoupledSGDW/group0": 0.1, "lr-DecoupledAdamW/group0": 0.2}

    def test_wrapped_optimizer_keeps_its_name(self):
        """An algorithm that wraps an optimizer does not change the metric's name."""
        wrapped = SAMOptimizer(DecoupledSGDW([parameter()], lr=0.1))

        assert logged(wrapped, DecoupledSGDW([parameter()], lr=0.2)) == {
            "lr-DecoupledSGDW/group0": 0.1,
            "lr-DecoupledSGDW.1/group0": 0.2,
        }

    def test_learning_rate_in_a_tensor(self):
        """A tensor that schedulers change in place is logged with its value at that batch."""
        rate = torch.tensor(0.5)
        optimizer = torch.optim.SGD([parameter()], lr=rate, foreach=False)
        values = logged(optimizer)
        rate.fill_(0.25)

        assert values == {"lr-SGD/group0": 0.5}

    @pytest.mark.parametrize("duration", ["4ba", "2ep"])
    def test_logged_rate_is_the_one_used(self, duration):
        """The rate logged for a batch number is the one that batch was trained with."""
        network = torch.nn.Linear(3, 2)
        history = InMemoryLogger()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.8)
        used = []
        optimizer.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))

        trainer = Trainer(
            model=ComposerClassifier(network, num_classes=2),
            train_dataloader=[(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))] * 2,
            optimizers=optimizer,
            schedulers=LinearScheduler(),
            max_duration=duration,
            callbacks=LRMonitor(),
            loggers=history,
            progress_bar=False,
            device="cpu",
            precision="fp32",
        )
        trainer.fit()
        trainer.close()

        series = history.get_timeseries("lr-SGD/group0")
        assert series["lr-SGD/group0"] == used == pytest.approx([0.8, 0.6, 0.4, 0.2])
        assert series["batch"] == history.get_timeseries("loss/train/total")["batch"] == [0, 1, 2, 3]

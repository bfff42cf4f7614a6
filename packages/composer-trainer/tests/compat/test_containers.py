"""What programs pass that read their settings with OmegaConf."""

import pytest
import torch

from composer.algorithms import EMA, LabelSmoothing
from composer.callbacks import LRMonitor
from composer.core import Evaluator
from composer.optim import DecoupledAdamW, LinearWithWarmupScheduler, Muon
from fixtures import make_classifier, make_loader, small_run

omegaconf = pytest.importorskip("omegaconf", reason="OmegaConf is in the test group")


def container(value):
    """Return a value in OmegaConf's container, which stores objects as Hydra's do."""
    return omegaconf.OmegaConf.create({"value": value}, flags={"allow_objects": True}).value


def test_algorithms_and_callbacks_of_containers():
    """Algorithms, callbacks and schedulers in containers train."""
    smoothing, ema, monitor = LabelSmoothing(0.1), EMA(), LRMonitor()
    parts = {"algorithms": [smoothing, ema], "callbacks": [monitor], "schedulers": [LinearWithWarmupScheduler("1ba")]}
    config = omegaconf.OmegaConf.create(parts, flags={"allow_objects": True})

    with small_run(max_duration="2ba", **config) as trainer:
        trainer.fit()

    assert {smoothing, ema} <= {*trainer.state.algorithms}
    assert monitor in trainer.state.callbacks


def test_evaluators_of_containers():
    """Evaluators in a container are evaluated one by one."""
    evaluators = container([Evaluator(label=label, dataloader=make_loader()) for label in ("a", "b")])

    with small_run(max_duration="1ep", eval_dataloader=evaluators) as trainer:
        trainer.fit()

    assert {"a", "b"} <= trainer.state.eval_metrics.keys()


@pytest.mark.parametrize(
    "make",
    [
        lambda weights, betas: DecoupledAdamW(weights, lr=0.01, betas=betas),
        lambda weights, betas: Muon([{"params": [*weights], "use_muon": False}], betas=betas),
        lambda weights, betas: torch.optim.AdamW(weights, lr=0.01, betas=betas),
        lambda weights, betas: torch.optim.NAdam(weights, lr=0.01, betas=betas),
    ],
    ids=["DecoupledAdamW", "Muon", "AdamW", "NAdam"],
)
def test_betas_of_containers(tmp_path, make):
    """A list of OmegaConf as betas gives the same training as a tuple, and can be saved and resumed."""
    weights = []
    for betas in ((0.8, 0.95), container([0.8, 0.95])):
        run = {"max_duration": "2ep", "save_folder": f"{tmp_path}/{len(weights)}", "run_name": "a"}
        model = make_classifier()
        with small_run(model=model, optimizers=make(model.parameters(), betas), **run) as trainer:
            trainer.fit()
        assert all(type(group["betas"]) is tuple for one in trainer.state.optimizers for group in one.param_groups)
        weights.append([parameter.detach() for parameter in trainer.state.model.parameters()])

    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


def test_autoresume_can_be_none():
    """None is False, as in a configuration without the entry."""
    with small_run(max_duration="1ba", autoresume=None) as trainer:
        trainer.fit()

    assert trainer.state.timestamp.batch == 1

"""What programs pass that read their settings with OmegaConf."""

import pytest
import torch

from composer.algorithms import EMA, LabelSmoothing
from composer.callbacks import LRMonitor
from composer.core import DataSpec, Evaluator
from composer.distributed import initialize_dist
from composer.optim import DecoupledAdamW, LinearWithWarmupScheduler, Muon
from fixtures import make_classifier, make_loader, small_run

omegaconf = pytest.importorskip("omegaconf", reason="OmegaConf is in the test group")


def container(value):
    """Return a value in OmegaConf's container, which stores objects as Hydra's do."""
    return omegaconf.OmegaConf.create({"value": value}, flags={"allow_objects": True}).value


@pytest.mark.parametrize(
    "one",
    [
        LabelSmoothing(0.1),
        EMA(),
        LRMonitor(),
        LinearWithWarmupScheduler("1ba"),
        DataSpec([torch.ones(1)]),
        Evaluator(label="a", dataloader=[torch.ones(1)]),
    ],
    ids=lambda one: type(one).__name__,
)
def test_objects_are_not_converted(one):
    """An object in a container is the object itself, also if it is put there later."""
    config = omegaconf.OmegaConf.create({"many": []}, flags={"allow_objects": True})
    config.many.append(one)

    assert container(one) is one
    assert next(iter(container([one]))) is one
    assert config.many[0] is one


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


def test_settings_of_containers_are_saved_as_data(tmp_path):
    """A list of OmegaConf in an optimizer's group is saved as a tuple, and resumed."""
    for duration in ("1ep", "2ep"):
        model = make_classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["note"] = container([1, 2])
        settings = {"save_folder": str(tmp_path), "run_name": "a", "autoresume": True, "max_duration": duration}
        with small_run(model=model, optimizers=optimizer, **settings) as trainer:
            trainer.fit()

    assert trainer.state.timestamp.epoch == 2
    assert trainer.state.optimizers[0].param_groups[0]["note"] == (1, 2)


def test_autoresume_can_be_none():
    """None is False, as in a configuration without the entry."""
    with small_run(max_duration="1ba", autoresume=None) as trainer:
        trainer.fit()

    assert trainer.state.timestamp.batch == 1


def test_the_device_of_processes_can_be_none():
    """Without a device, a single process starts no group, as with a device."""
    initialize_dist(None, 100.0)

    assert not torch.distributed.is_initialized()

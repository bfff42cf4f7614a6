"""Statistics of activations, compared with scipy's definitions."""

import copy

import pytest
import torch
from torch import nn

from composer.callbacks import ActivationMonitor
from composer.core import LoggerDestination
from composer.loggers import InMemoryLogger
from fixtures import make_classifier, same_bits, trained, vector_batches


class WandBLogger(LoggerDestination):
    """A module that is recognized by its class name."""

    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step=None):
        self.logged += [(step, name) for name in metrics if name.startswith("activations/")]


def make_model(dropout=0.0):
    torch.manual_seed(1)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)]
    return make_classifier(nn.Sequential(*layers), train_metrics=[])


def fit(model, monitor, loggers, **options):
    batches = vector_batches(4, size=6)
    trained(model=model, train_dataloader=batches, callbacks=monitor, loggers=loggers, **options)
    return batches


def activations(history):
    return {name: values for name, values in history.data.items() if name.startswith("activations/")}


class TestActivationMonitor:
    def test_statistics(self):
        """Each statistic is computed along the last dimension and averaged over the samples."""
        model, history = make_model(), InMemoryLogger()
        first = copy.deepcopy(model.module[0])

        batches = fit(model, ActivationMonitor("1ba", only_log_wandb=False), history)

        values = first(batches[0][0]).detach().double()
        centred = values - values.mean(dim=1, keepdim=True)
        spread = centred.pow(2).mean(dim=1)
        expected = {
            "average": values.mean(dim=1).mean(),
            "max": values.max(dim=1).values.mean(),
            "l2_norm": values.pow(2).sum(dim=1).sqrt().mean(),
            "skewness": (centred.pow(3).mean(dim=1) / spread**1.5).mean(),
            "kurtosis": (centred.pow(4).mean(dim=1) / spread**2).mean(),
        }
        logged = {name: float(history.data[f"activations/{name}/module.0/output_0"][0][1]) for name in expected}
        assert logged == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-4)
        assert float(history.data["activations/max/module.3/input_0"][0][1]) == pytest.approx(
            float(history.data["activations/max/module.2/output_0"][0][1])
        )

    def test_only_due_batches(self):
        """Only due batches are measured, and hooks are removed afterwards."""
        model, history = make_model(), InMemoryLogger()

        fit(model, ActivationMonitor("2ba", only_log_wandb=False), history)

        assert history.get_timeseries("activations/average/module.0/output_0")["batch"] == [2]
        assert all(not module._forward_hooks for module in model.modules())

    def test_first_microbatch_only(self):
        """A batch in microbatches is logged once."""
        model, history = make_model(), InMemoryLogger()

        fit(model, ActivationMonitor("1ba", only_log_wandb=False), history, device_train_microbatch_size=2)

        assert history.get_timeseries("activations/average/module.0/output_0")["batch"] == [0, 1, 2, 3]

    def test_ignored_module_types(self):
        """Modules whose class has one of the names are skipped."""
        model, history = make_model(), InMemoryLogger()

        fit(model, ActivationMonitor("1ba", ["Linear", "Dropout"], only_log_wandb=False), history)

        modules = {name.split("/")[2] for name in activations(history)}
        assert modules == {"module", "module.1"}

    def test_only_to_wandb(self):
        """By default values are logged to WandBLogger only."""
        history, wandb = InMemoryLogger(), WandBLogger()

        fit(make_model(), ActivationMonitor("1ba"), [history, wandb])

        assert not activations(history)
        assert {step for step, _ in wandb.logged} == {0, 1, 2, 3}

    def test_warns_without_wandb(self):
        """Without a destination one warning states the remedy, and no module is hooked."""
        with pytest.warns(UserWarning, match="only_log_wandb=False") as caught:
            fit(make_model(), ActivationMonitor("1ba"), InMemoryLogger())

        assert len(caught) == 1

    def test_does_not_change_training(self):
        """Also with dropout, the weights are bit-identical with and without the monitor."""
        alone, monitored = make_model(dropout=0.5), make_model(dropout=0.5)

        fit(alone, [], InMemoryLogger())
        fit(monitored, ActivationMonitor("1ba", only_log_wandb=False), InMemoryLogger())

        assert same_bits(alone.state_dict(), monitored.state_dict())

    def test_compiled_model(self):
        """A compiled model is measured as another one, and stays compiled otherwise."""
        found, calls = [], []

        def backend(graph, inputs):
            return lambda *arguments: calls.append(0) or graph(*arguments)

        for options in ({}, {"compile_config": {"backend": backend}}):
            history = InMemoryLogger()
            fit(make_model(), ActivationMonitor("3ba", only_log_wandb=False), history, **options)
            found.append({name: values[0][1].item() for name, values in activations(history).items()})

        assert found[0]
        assert found[1] == pytest.approx(found[0], rel=1e-4)
        assert len(calls) == 3

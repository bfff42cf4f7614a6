"""ActivationCheckpointing: blocks that compute their activations again in the backward pass."""

import pytest
from torch import nn

from composer.algorithms import ActivationCheckpointing, GhostBatchNorm, GyroDropout
from composer.core import AlgorithmConflictError, Engine, Event, State, explain
from fixtures.models import make_transformer


def make_blocks():
    """Return a model of three transformer layers."""
    return nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8) for _ in range(3)))


def start(model, *algorithms):
    """Return an engine after INIT."""
    engine = Engine(State(model), algorithms=list(algorithms))
    engine.run_event("init")
    return engine


def test_blocks_are_changed_at_init():
    """At INIT each second block is changed, the report lists them, and the state's keys remain."""
    model = make_blocks()
    names = list(model.state_dict())
    algorithm = ActivationCheckpointing(every=2)

    start(model, algorithm)

    assert [type(layer).__name__.startswith("Checkpointed") for layer in model] == [True, False, True]
    assert [entry.paths for entry in algorithm.surgery_report] == [("0",), ("2",)]
    assert list(model.state_dict()) == names
    assert not algorithm.required_on_load()


def test_it_runs_after_other_surgery():
    """At any position in the list it runs after algorithms that replace layers."""
    plan = explain([ActivationCheckpointing(), GhostBatchNorm()])

    assert [entry.key for entry in plan.entries[Event.INIT]] == ["GhostBatchNorm", "ActivationCheckpointing"]


def test_gyro_dropout_is_a_conflict():
    """GyroDropout counts forward passes, so that both together raise an error."""
    with pytest.raises(AlgorithmConflictError, match="where GyroDropout would take other masks"):
        Engine(State(make_blocks()), algorithms=[ActivationCheckpointing(), GyroDropout()])


def test_checkpointing_that_is_enabled_later_raises():
    """If the own checkpointing of a model is enabled after INIT, as by Transformers, FIT_START raises an error."""
    model = make_transformer("gpt2")
    engine = start(model, ActivationCheckpointing())
    engine.run_event("fit_start")

    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()

    with pytest.raises(ValueError, match="must not use other gradient checkpointing"):
        engine.run_event("fit_start")

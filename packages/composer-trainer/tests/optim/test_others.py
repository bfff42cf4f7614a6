"""Optimizers of other libraries in the Trainer, as they are: what guides/optimizers_of_others.md states of each."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from composer import Callback
from composer.algorithms import EMA, GradientClipping, SkipSpikes
from composer.core.evaluator import evaluation_weights
from composer.core.saving.codec import NotSerializableError, split_tensors
from composer.optim import CosineAnnealingWithWarmupScheduler
from fixtures import make_classifier, trained, weights
from fixtures.data import vectors

LIBRARIES = {
    "schedulefree": {
        "AdamWScheduleFree": {"lr": 0.02, "warmup_steps": 3},
        "RAdamScheduleFree": {"lr": 0.02},
        "SGDScheduleFree": {"lr": 0.1, "warmup_steps": 3},
    },
    "pytorch_optimizer": {
        "AdEMAMix": {"lr": 0.01, "t_alpha_beta3": 8},
        "Kron": {"lr": 0.01},
        "Lion": {"lr": 0.003},
        "MARS": {"lr": 0.01},
        "Prodigy": {"d0": 1e-3},
        "SOAP": {"lr": 0.01, "precondition_frequency": 2},
        "ScheduleFreeAdamW": {"lr": 0.02},
    },
    "torchao.optim": {
        "AdamW8bit": {"lr": 0.01, "eps": 1e-4},
    },
}
OTHERS = [(library, name) for library, settings in LIBRARIES.items() for name in settings]
SCHEDULE_FREE = [one for one in OTHERS if "ScheduleFree" in one[1]]
each = pytest.mark.parametrize("other", OTHERS, ids="-".join)


@pytest.fixture(autouse=True)
def without_compiler():
    """Torchao compiles its step, which takes a minute on a CPU; the function that it compiles is called instead."""
    with torch.compiler.set_stance("force_eager"):
        yield


def make(other, model, draws=True):
    """Return an optimizer of a model's parameters, with the hooks of the guide for quantized states."""
    library, name = other
    module = pytest.importorskip(library, reason="it is an optional optimizer")
    still = {"pre_conditioner_update_probability": 0.0} if name == "Kron" and not draws else {}
    optimizer = getattr(module, name)(model.parameters(), **LIBRARIES[library][name], **still)
    if library == "torchao.optim":
        optimizer.register_state_dict_post_hook(take_apart)
        optimizer.register_load_state_dict_pre_hook(put_together)
    return optimizer


def change_state(saved, change):
    state = {key: {name: change(value) for name, value in held.items()} for key, held in saved["state"].items()}
    return saved | {"state": state}


def take_apart(optimizer, saved):
    def parts(value):
        if not hasattr(value, "codes"):
            return value
        names, settings = value.__tensor_flatten__()
        return {"tensors": {name: getattr(value, name) for name in names}, "settings": settings}

    return change_state(saved, parts)


def put_together(optimizer, saved):
    from torchao.optim.subclass_8bit import OptimState8bit

    def joined(value):
        if not isinstance(value, dict):
            return value
        return OptimState8bit.__tensor_unflatten__(value["tensors"], value["settings"])

    return change_state(saved, joined)


def make_model(name=""):
    """Return a classifier with a weight that is large enough, 4,096 numbers, for states of 8 bits."""
    torch.manual_seed(3)
    size = 16 if name == "Kron" else 64  # its products of 64 take half a second each
    layers = nn.Linear(4, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 3)
    return make_classifier(nn.Sequential(*layers))


def settings(other, draws=True, **options):
    """Return arguments of a run with the optimizer, under a schedule."""
    model = make_model(other[1])
    schedule = [] if other in SCHEDULE_FREE else CosineAnnealingWithWarmupScheduler("2ba")
    defaults = {"model": model, "optimizers": make(other, model, draws), "schedulers": schedule, "max_duration": "8ba"}
    return defaults | options


def state_of(trainer):
    """Return the optimizer's state and settings by their paths."""
    return dict(torch.utils._pytree.tree_leaves_with_path(trainer.state.optimizers[0].state_dict()))


def same(one, other):
    """Return whether two states are equal bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[path]) if isinstance(value, torch.Tensor) else value == other[path]
        for path, value in one.items()
    )


@each
def test_trains(other):
    """The loss falls, and the weights are those of a plain loop with a clipped norm, bit for bit."""
    run = trained(**settings(other, draws=False, algorithms=GradientClipping("norm", 0.5), schedulers=[]))

    model = make_model(other[1])
    optimizer, batches = make(other, model, draws=False), list(DataLoader(vectors(), batch_size=4))
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    losses = []
    for number in range(8):
        batch = batches[number % 5]
        optimizer.zero_grad()
        loss = model.loss(model(batch), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    assert torch.equal(weights(run), weights(model))
    assert losses[5] < losses[0]
    assert not torch.equal(weights(run), weights(trained(**settings(other, draws=False, schedulers=[]))))


@each
@pytest.mark.parametrize("algorithms", [(), (lambda: EMA("2ba"), lambda: GradientClipping("norm", 0.5))], ids=len)
def test_resumes_exactly(other, algorithms, tmp_path):
    """Weights, averages, and the optimizer's state and settings after a resume are bit-identical."""
    options = {"eval_dataloader": DataLoader(vectors(8), batch_size=8), "eval_interval": "3ba"}
    save = {"save_folder": str(tmp_path), "save_interval": "1ba", "save_filename": "ba{batch}"}
    full = trained(**settings(other, algorithms=[one() for one in algorithms], **options, **save))

    for stop in (1, 5):
        path = str(tmp_path / f"ba{stop}")
        resumed = trained(**settings(other, algorithms=[one() for one in algorithms], load_path=path, **options))

        assert torch.equal(weights(resumed), weights(full))
        assert same(state_of(resumed), state_of(full))
        with evaluation_weights(full.state), evaluation_weights(resumed.state):
            assert torch.equal(weights(resumed), weights(full))


@each
def test_ema(other):
    """The averages are those of the training weights after each step, and training is as without them."""
    seen = []

    class Observer(Callback):
        def batch_end(self, state, logger):
            seen.append(weights(state.model).double())

    run = trained(**settings(other, algorithms=EMA(half_life=None, smoothing=0.9), callbacks=Observer()))

    expected = seen[0]
    for one in seen[1:]:
        expected = 0.9 * expected + 0.1 * one
    with evaluation_weights(run.state):
        torch.testing.assert_close(weights(run).double(), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(weights(run), weights(trained(**settings(other))))


@pytest.mark.parametrize("other", SCHEDULE_FREE, ids="-".join)
def test_evaluation_weights(other):
    """An evaluation has the averages that the optimizer's own method writes, and does not change the training."""
    seen = []

    class Observer(Callback):
        def eval_start(self, state, logger):
            seen.append(weights(state.model))

    options = {"eval_dataloader": DataLoader(vectors(8), batch_size=8), "eval_interval": "4ba"}
    run = trained(**settings(other, callbacks=Observer(), **options))

    assert torch.equal(weights(run), weights(trained(**settings(other))))
    run.state.optimizers[0].eval()
    assert torch.equal(seen[-1], weights(run))
    run.state.optimizers[0].train()
    assert not torch.equal(seen[-1], weights(run))


SPIKE = 5
EXACT = {"Lion", "Prodigy", "AdamW8bit"}
"""Those whose steps do not depend on the number of steps in their groups."""


def without_step(optimizer, is_counted):
    """Let an optimizer take no step for the spike; if it is counted, weights and states are restored after it."""
    step, calls = optimizer.step, itertools.count()
    parameters = optimizer.param_groups[0]["params"]

    def replaced(closure=None):
        is_spike = next(calls) == SPIKE
        before = [(one.detach().clone(), copy.deepcopy(optimizer.state[one])) for one in parameters if is_counted]
        if not is_spike or is_counted:
            step(closure)
        for one, (weight, state) in zip(parameters, before, strict=False):
            if is_spike:
                one.detach().copy_(weight)
                optimizer.state[one] = state

    optimizer.step = replaced


def spiked(other, *algorithms, is_counted=None):
    """Train with one batch of which all classes are predicted wrongly."""
    batches = list(DataLoader(vectors(32), batch_size=4))
    batches[SPIKE][0].mul_(-1e3)
    options = settings(other, draws=False, train_dataloader=batches, algorithms=algorithms, schedulers=[])
    if is_counted is not None:
        without_step(options["optimizers"], is_counted)
    return weights(trained(**options))


@each
def test_skip_spikes(other):
    """A spike changes neither weights nor state; the number of steps in a group is changed, with a small effect."""
    guarded = spiked(other, SkipSpikes("20std", window=8))
    unguarded, expected = spiked(other), spiked(other, is_counted=False)

    distance, harm = ((one - expected).abs().max() for one in (guarded, unguarded))
    assert distance <= 0.2 * harm
    assert (distance == 0) == (other[1] in EXACT)
    if distance:
        assert torch.equal(guarded, spiked(other, is_counted=True))


def test_states_around_tensors_are_not_saved():
    """Without the hooks, a save names the state of 8 bits: exp_avg and exp_avg_sq would be saved as one tensor."""
    optim = pytest.importorskip("torchao.optim", reason="it is an optional optimizer")
    model = make_model()
    run = trained(model=model, optimizers=optim.AdamW8bit(model.parameters(), eps=1e-4))

    with pytest.raises(NotSerializableError, match=r"2\.weight\.exp_avg.* a quantized tensor cannot be saved"):
        split_tensors(run.state.get_optim_state_dict())

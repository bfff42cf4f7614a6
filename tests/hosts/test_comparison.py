"""The comparison of the hosts covers every algorithm, and detects differences."""

import inspect

import attrs
import pytest
import torch
from comparison import CASES, EPOCHS, SEED, Case, assert_same, each_case, our_weights, weights_of

import composer.algorithms as al
from composer.algorithms import EMA
from composer.core import Adapter, Algorithm, Event, Stage, served_fields

SAME_RESULTS = ("ActivationCheckpointing", "ChannelsLast", "FusedLayerNorm", "PostHocEMA")
"""They compute the same in another way, or write files, which tests of their own compare."""


class Nothing(Algorithm):
    """Changes nothing."""

    runs_at = {Event.INIT: Stage.AUGMENT}
    reads = writes = frozenset()

    def apply(self, event, state, logger):
        """Do nothing."""


def train(case, seed=SEED):
    """Train in a loop that calls the adapter, and return the weights."""
    model = case.make_model()
    adapter = Adapter(
        served_fields("Loop"),
        model,
        case.make_algorithms(),
        forward=lambda batch: case.forward(model, batch),
        loss=case.loss,
        seed=seed,
        precision=case.precision,
    )
    data = case.make_data()
    adapter.prepare(case.make_optimizer(model), max_duration=f"{EPOCHS}ep", train_dataloader=data)
    adapter.begin_fit()
    (optimizer,) = adapter.optimizers
    for _ in range(EPOCHS):
        adapter.begin_epoch()
        for batch in data:
            changed = adapter.begin_batch(batch)

            def closure(changed=changed):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "amp_bf16"):
                    loss = adapter.compute_loss(changed)
                loss.backward()
                adapter.end_backward()
                adapter.end_gradients()
                return loss.detach()

            optimizer.step(closure)
            adapter.end_step()
        adapter.end_epoch()
    adapter.end_fit()
    return weights_of(adapter.state, model)


def test_every_algorithm_has_a_case():
    """The ids begin with the names of all algorithms but those that replace or grow the model, or choose samples."""
    names = {name for name in al.__all__ if inspect.isclass(one := getattr(al, name)) and issubclass(one, Algorithm)}
    assert {name.split("-")[0].split()[0] for name in CASES} == names - {"DepthStacking", "InfoBatch", "NoOpModel"}


@each_case
@pytest.mark.filterwarnings("error", "ignore:precision='amp_bf16' is many times slower:UserWarning")
def test_a_loop_with_an_adapter(case):
    """A loop that calls the adapter gets the weights of our Trainer."""
    assert_same(train(case), our_weights(case))


@pytest.mark.parametrize("architecture", ["vit", "bert", "gpt2"])
def test_own_loss(architecture):
    """The loss of the model itself gives nearly the weights of the loss from the logits."""
    case = Case(lambda: EMA("2ba"), architecture)
    own, ours = our_weights(case, own_loss=True), our_weights(case)
    torch.testing.assert_close(own, ours, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(SAME_RESULTS)])
@pytest.mark.filterwarnings("ignore:precision='amp_bf16' is many times slower:UserWarning")
def test_each_algorithm_acts(name):
    """Without its algorithm, a case has other weights: a host that ignores the algorithm is detected."""
    case = CASES[name]
    without = attrs.evolve(case, algorithm=Nothing)

    with pytest.raises(AssertionError, match=r"weights (differ|are missing|are unexpected)"):
        assert_same(our_weights(without), our_weights(case))

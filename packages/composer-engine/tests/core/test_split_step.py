"""A training step is split at the call of a module, and its loss must follow targets that have changed since then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from composer.algorithms import EMA, CutMix, LabelSmoothing, MixUp
from composer.core import Adapter, Algorithm, Event, SplitStep, Stage, served_fields

IMAGES, LABELS = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1])


class TestSplitStep:
    """A function of a complete step is split at the call of the module."""

    def test_module_that_is_not_called(self):
        """The error names the module, whose forward function is restored."""
        module = nn.Linear(48, 3)
        split = SplitStep(lambda batch: batch[0].sum(), module)
        with pytest.raises(RuntimeError, match="did not call Linear"):
            split.forward((IMAGES, LABELS))
        assert "forward" not in vars(module)

    def test_own_forward_of_the_instance(self):
        """A forward function that was set on the module itself is restored, also after an error in it."""
        module = nn.Linear(2, 2)

        def own(inputs):
            raise ValueError("own")

        module.forward = own
        split = SplitStep(lambda batch: module(batch).sum(), module)
        with pytest.raises(ValueError, match="own"):
            split.forward(torch.ones(1, 2))
        assert module.forward is own


class Flips(Algorithm):
    """Gives each sample the target of another after the forward pass."""

    runs_at = {Event.BEFORE_LOSS: Stage.LABEL}
    reads = writes = frozenset({"batch.target"})

    def apply(self, event, state, logger):
        state.batch_set_item(1, state.batch_get_item(1).roll(1))


CONTAINERS = {
    "dictionary": (dict, dict.get),
    "object": (lambda values: SimpleNamespace(**values), getattr),
    "tuple": (lambda values: tuple(values.values()), lambda out, name: out[["logits", "loss", "penalty"].index(name)]),
}


def train(algorithm, loss, container="dictionary", labels=LABELS):
    """Take two steps with a model that returns scores, the loss of its labels, and a loss that needs none.

    Args:
        algorithm: The algorithm.
        loss: ``f(get, labels) -> loss``; ``get`` returns one of the outputs.
        container: What the model returns.
        labels: The labels of both batches.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(48, 3)
    pack, get = CONTAINERS[container]

    def forward(batch):
        scores = model(batch[0].flatten(1))
        return pack(
            {"logits": scores, "loss": cross_entropy(scores, batch[1]), "penalty": scores.square().mean().reshape(1)}
        )

    def compute_loss(outputs, batch):
        return loss(lambda name: get(outputs, name), batch[1])

    adapter = Adapter(served_fields("Host"), model, algorithm, forward=forward, loss=compute_loss)
    adapter.begin_fit(torch.optim.SGD(model.parameters(), lr=0.1), max_duration="2ba")
    for _ in range(2):
        adapter.compute_loss(adapter.begin_batch((IMAGES, labels))).backward()
        adapter.end_backward()
        adapter.end_gradients()
        adapter.optimizers[0].step()
        adapter.optimizers[0].zero_grad()
        adapter.end_step()
    return model.weight.detach()


class TestFirstLoss:
    """The first loss for changed targets must not be that of the forward pass."""

    @pytest.mark.parametrize("container", CONTAINERS)
    def test_loss_of_the_forward_pass(self, container):
        """A loss that the forward pass has computed raises, also as a part of another loss."""
        for loss in (lambda get, _: get("loss"), lambda get, _: {"a": 2 * get("loss"), "b": get("penalty").sum()}):
            with pytest.raises(ValueError, match=r"The loss in Host must be computed from the targets of the batch"):
                train(Flips(), loss, container)

    @pytest.mark.parametrize(
        "algorithm", [LabelSmoothing(0.1), MixUp(), CutMix(), MixUp(interpolate_loss=True)], ids=repr
    )
    def test_algorithms(self, algorithm):
        """Each algorithm that changes targets is checked, also one that blends the losses of two targets."""
        with pytest.raises(ValueError, match=r"instead of outputs\.loss write cross_entropy\(outputs\.logits"):
            train(algorithm, lambda get, _: get("loss"))

    @pytest.mark.parametrize("container", CONTAINERS)
    def test_loss_of_the_targets(self, container):
        """A loss of scores and targets is trained, with and without a part of the outputs that depends on no target."""
        plain = train(Flips(), lambda get, labels: cross_entropy(get("logits"), labels), container)
        both = train(Flips(), lambda get, labels: cross_entropy(get("logits"), labels) + get("penalty"), container)
        assert not torch.equal(plain, both)

    def test_targets_that_are_changed_to_the_same(self):
        """Where all labels of a batch are equal, a change of them cannot be seen in the loss."""
        same = torch.ones_like(LABELS)
        for algorithm in (Flips(), MixUp()):
            trained = train(
                algorithm, lambda get, labels: cross_entropy(get("logits"), labels) + get("penalty"), labels=same
            )
            assert not torch.equal(trained, train(algorithm, lambda get, _: 0 * get("penalty"), labels=same))

    def test_algorithm_that_changes_no_target(self):
        """Without changed targets the loss of the forward pass is right, and is the same as that of the targets."""
        own = train(EMA("2ba"), lambda get, _: get("loss"))
        assert torch.equal(own, train(EMA("2ba"), lambda get, labels: cross_entropy(get("logits"), labels)))

    def test_no_loss(self):
        """The error for a loss that is None names the labels that a model of Transformers needs."""
        with pytest.raises(TypeError, match=r"got None\. A model of Transformers returns one only if .* with labels"):
            train(EMA("2ba"), lambda *_: None)

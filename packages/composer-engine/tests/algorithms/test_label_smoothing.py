"""LabelSmoothing: labels are smoothed for the loss only."""

from collections import namedtuple

import pytest
import torch

from composer.algorithms import LabelSmoothing
from composer.core import Event, Stage, explain

Pair = namedtuple("Pair", ["images", "labels"])


class TestTargets:
    def test_class_ids(self, watch, make_engine, step, batch, one_hot):
        """The loss receives 0.9 of each label, with 0.1 spread evenly over three classes."""
        model = watch()

        step(make_engine(model, LabelSmoothing(0.1)), batch)

        assert torch.allclose(model.seen.targets[0], 0.9 * one_hot(batch[1]) + 0.1 / 3)

    def test_probabilities(self, watch, make_engine, step, batch):
        """Soft labels are smoothed too."""
        model, soft = watch(), torch.rand(8, 3).softmax(1)

        step(make_engine(model, LabelSmoothing(0.3)), (batch[0], soft))

        assert torch.allclose(model.seen.targets[0], 0.7 * soft + 0.3 / 3)

    @pytest.mark.parametrize("shape", [(8,), (8, 1)])
    def test_one_score(self, watch, make_engine, step, batch, shape):
        """A target for one score would not change, so that the error states what to do."""
        model = watch(torch.nn.Linear(8, 1), loss=torch.nn.functional.binary_cross_entropy_with_logits)

        with pytest.raises(ValueError, match=r"two scores, as nn.Linear\(\.\.\., 2\)"):
            step(make_engine(model, LabelSmoothing()), (batch[0], (batch[1] % 2).float().view(shape)))

    def test_gradients_use_smoothed_labels(self, watch, make_engine, step, batch, one_hot, soft_loss):
        """Training uses the loss of the smoothed labels."""
        model = watch()

        state = step(make_engine(model, LabelSmoothing(0.2)), batch)

        assert torch.allclose(state.loss, soft_loss(model.seen.outputs[0], 0.8 * one_hot(batch[1]) + 0.2 / 3))

    def test_labels_are_restored(self, watch, make_engine, step, batch):
        """After the loss the batch contains the original, unmodified tensor."""
        ids = batch[1].clone()

        state = step(make_engine(watch(), LabelSmoothing(0.1)), batch)

        assert state.batch[1] is batch[1]
        assert torch.equal(batch[1], ids)

    def test_labels_are_released(self, watch, make_engine, step, batch):
        """After the loss the algorithm references no tensor of the batch."""
        algorithm = LabelSmoothing(0.1)

        step(make_engine(watch(), algorithm), batch)

        assert algorithm._target is None

    def test_two_instances(self, watch, make_engine, step, batch, one_hot):
        """Two instances smooth one after the other, and each restores its own input."""
        model = watch()

        state = step(make_engine(model, LabelSmoothing(0.1), LabelSmoothing(0.2)), batch)

        once = 0.9 * one_hot(batch[1]) + 0.1 / 3
        assert torch.allclose(model.seen.targets[0], 0.8 * once + 0.2 / 3)
        assert state.batch[1] is batch[1]


class TestBatchKeys:
    @pytest.mark.parametrize(
        ("pack", "key"),
        [
            (lambda x, y: (x, y), 1),
            (lambda x, y: [x, y], -1),
            (lambda x, y: {0: x, "y": y}, "y"),
            (Pair, "labels"),
            (lambda x, y: (x, {"y": y}), (lambda b: b[1]["y"], lambda b, y: (b[0], {"y": y}))),
        ],
        ids=["tuple", "list", "dict", "namedtuple", "functions"],
    )
    def test_keys_and_functions(self, watch, make_engine, step, batch, one_hot, pack, key):
        """Labels are read and restored by their key, and the batch keeps its type."""
        model = watch(target=key)

        state = step(make_engine(model, LabelSmoothing(0.1, key)), pack(*batch))

        assert type(state.batch) is type(pack(*batch))
        assert torch.allclose(model.seen.targets[0], 0.9 * one_hot(batch[1]) + 0.1 / 3)
        assert model._get[1](state.batch) is batch[1]

    def test_in_place_setter(self, watch, make_engine, step, batch):
        """A setter that modifies the batch in place also restores the labels."""

        def put(batch, value):
            batch["y"] = value
            return batch

        model = watch(input="x", target="y")

        state = step(make_engine(model, LabelSmoothing(0.1, (lambda b: b["y"], put))), {"x": batch[0], "y": batch[1]})

        assert state.batch["y"] is batch[1]


def test_plan():
    """Labels are smoothed before the loss and restored after it."""
    entries = explain(LabelSmoothing()).entries

    assert {event: [one.stage for one in entries[event]] for event in entries} == {
        Event.BEFORE_LOSS: [Stage.LABEL],
        Event.AFTER_LOSS: [Stage.LABEL],
    }

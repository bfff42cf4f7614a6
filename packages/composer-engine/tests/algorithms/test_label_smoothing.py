"""LabelSmoothing: labels are smoothed for the loss only."""

from collections import namedtuple

import pytest
import torch

from composer.algorithms import LabelSmoothing

Pair = namedtuple("Pair", ["images", "labels"])


class TestTargets:
    def test_class_ids(self, watch, make_engine, step, batch, one_hot):
        """The loss receives 0.9 of each label, with 0.1 spread evenly over three classes."""
        model = watch()

        step(make_engine(model, LabelSmoothing(0.1)), batch)

        assert torch.allclose(model.seen.targets[0], 0.9 * one_hot(batch[1]) + 0.1 / 3)

    @pytest.mark.parametrize("shape", [(8,), (8, 1)])
    def test_one_score(self, watch, make_engine, step, batch, shape):
        """A target for one score would not change, so that the error states what to do."""
        model = watch(torch.nn.Linear(8, 1), loss=torch.nn.functional.binary_cross_entropy_with_logits)

        with pytest.raises(ValueError, match=r"two scores, as nn.Linear\(\.\.\., 2\)"):
            step(make_engine(model, LabelSmoothing()), (batch[0], (batch[1] % 2).float().view(shape)))

    def test_several_targets_raise(self, watch, make_engine, step, batch):
        """A dictionary of targets, as of ComposerMultiTask, raises with what to do."""
        with pytest.raises(TypeError, match=r"one target for each sample, got dict\. For several"):
            step(make_engine(watch(), LabelSmoothing()), (batch[0], {"age": batch[1], "kind": batch[1]}))

    def test_labels_are_restored(self, watch, make_engine, step, batch):
        """After the loss the batch contains the original, unmodified tensor."""
        ids = batch[1].clone()

        state = step(make_engine(watch(), LabelSmoothing(0.1)), batch)

        assert state.batch[1] is batch[1]
        assert torch.equal(batch[1], ids)


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

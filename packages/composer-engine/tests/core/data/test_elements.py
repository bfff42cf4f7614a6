"""What a loss is the mean over: each rule, and weights that stay on their device."""

import pytest
import torch
from torch import nn

from composer.core import DataSpec
from composer.core.data.elements import Elements, weighted_by

BATCH = {"input_ids": torch.zeros(2, 3), "labels": torch.tensor([[1, -100, -100], [1, 1, -100]])}


class Model(nn.Module):
    """Counts labels."""

    loss_is_sum = False

    def count_loss_terms(self, batch):
        return batch["labels"].ne(-100).sum()


class Sums(Model):
    """Its loss is a sum."""

    loss_is_sum = True


def elements_of(model, *, by_tokens=False, **options):
    return Elements(model, DataSpec([], **options), by_tokens=by_tokens)


@pytest.mark.parametrize(
    ("elements", "count", "are_usual", "on_device"),
    [
        (elements_of(Sums()), 2, False, None),
        (elements_of(Model(), by_tokens=True, get_num_tokens_in_batch=lambda _: 5), 5, False, None),
        (elements_of(Model(), by_tokens=True, get_num_tokens_in_batch=lambda _: {"total": 5, "loss_generating": 4}),
         4, False, None),
        (elements_of(Model(), by_tokens=True), 6, False, 3),
        (elements_of(Model()), 2, True, 3),
        (elements_of(nn.Identity(), by_tokens=True), 6, False, None),
        (elements_of(nn.Identity()), 2, True, None),
    ],
    ids=["a sum", "tokens of the user", "its loss_generating ones", "the model before all ids", "the model", "all ids",
         "samples"],
)  # fmt: skip
def test_rules(elements, count, are_usual, on_device):
    """Each rule counts as it states, and the host has a number also where the model counts."""
    found = elements.on_device([(BATCH, 1.0)])

    assert elements.count(BATCH) == count
    assert elements.are_usual is are_usual
    assert (found if found is None else found[0].item()) == on_device


def test_one_microbatch_that_the_model_does_not_count():
    """Then the rules for the host hold for all of them."""

    class Some(Model):
        def count_loss_terms(self, batch):
            return None if batch is BATCH else super().count_loss_terms(batch)

    assert elements_of(Some()).on_device([({**BATCH}, 0.5), (BATCH, 0.5)]) is None


def test_weights():
    """Each microbatch has its fraction; without any element, weights are 0 and not NaN."""
    microbatches = [("a", 0.5), ("b", 0.5)]

    assert [float(weight) for _, weight in weighted_by(microbatches, [torch.tensor(3), torch.tensor(1)])] == [
        0.75,
        0.25,
    ]
    assert [float(weight) for _, weight in weighted_by(microbatches, [torch.tensor(0)] * 2)] == [0, 0]

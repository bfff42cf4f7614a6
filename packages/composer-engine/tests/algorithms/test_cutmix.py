"""CutMix: what the model and the loss get, and what is drawn."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from composer.algorithms import CutMix, LabelSmoothing
from composer.core import explain

SAMPLES = 8


@pytest.fixture
def numbered():
    """Images whose pixels all hold the image's number, so that what was pasted where can be read off; and ids."""
    images = torch.arange(SAMPLES).float().view(-1, 1, 1, 1).expand(-1, 1, 8, 8).contiguous()
    return images, torch.arange(SAMPLES) % 3


@pytest.fixture
def pixels(watch):
    """Return a model over the 64 pixels of an image."""
    return watch(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)))


def infer_boxes(mixed):
    """Return how much of each image was pasted over, and by which."""
    own = torch.arange(SAMPLES).view(-1, 1, 1, 1)
    pasted = mixed != own
    share = pasted.float().mean((1, 2, 3))
    partners = torch.where(pasted.any(1).any(1).any(1), (mixed * pasted).amax((1, 2, 3)).long(), own.flatten())
    zero = pasted.flatten(1).any(1) & ((mixed * pasted).amax((1, 2, 3)) == 0)
    return share, torch.where(zero, torch.zeros_like(partners), partners)


@pytest.mark.parametrize("soft", [False, True])
def test_targets_are_blended_by_area(soft, pixels, engine_of, step, numbered, one_hot):
    """Targets are weighted by area, for class ids and for probabilities."""
    images, ids = numbered
    targets = torch.rand(SAMPLES, 3).softmax(1) if soft else ids

    step(engine_of(pixels, CutMix()), (images, targets))

    share, partners = infer_boxes(pixels.seen.inputs[0])
    probabilities = targets if soft else one_hot(ids)
    area = share.max()
    expected = (1 - area) * probabilities + area * probabilities[partners]
    moved = share > 0
    assert 0 < area < 1
    assert torch.allclose(pixels.seen.targets[0][moved], expected[moved], atol=1e-6)


def test_losses_are_blended_by_area(pixels, engine_of, step, numbered):
    """With interpolate_loss the losses of both class ids are weighted by area."""
    images, ids = numbered
    engine = engine_of(pixels, CutMix(interpolate_loss=True))

    state = step(engine, (images, ids))

    outputs, (own, partner) = pixels.seen.outputs[0], pixels.seen.targets
    area = infer_boxes(pixels.seen.inputs[0])[0].max()
    expected = (1 - area) * cross_entropy(outputs, own) + area * cross_entropy(outputs, partner)
    assert not own.is_floating_point()
    assert torch.allclose(state.loss, expected)
    assert torch.equal(state.batch[1], ids)


def test_smoothing_follows_mixing(pixels, engine_of, step, numbered, one_hot):
    """LabelSmoothing smooths the mixed labels, independent of list order."""
    seen = []
    for algorithms in ([CutMix(), LabelSmoothing(0.3)], [LabelSmoothing(0.3), CutMix()]):
        step(engine_of(pixels, *algorithms), numbered)
        seen.append(pixels.seen.targets[-1])
    step(engine_of(pixels, CutMix()), numbered)

    assert torch.allclose(seen[0], 0.7 * pixels.seen.targets[-1] + 0.1)
    assert torch.equal(seen[0], seen[1])


def test_loader_batch_is_not_modified(pixels, engine_of, step, numbered):
    """The loader's tensors are not modified."""
    images, ids = numbered[0].clone(), numbered[1].clone()

    step(engine_of(pixels, CutMix()), numbered)

    assert torch.equal(numbered[0], images)
    assert torch.equal(numbered[1], ids)


def test_two_instances_warn():
    """Two algorithms that interpolate the loss give a warning in the plan."""
    plan = explain([CutMix(interpolate_loss=True), CutMix(interpolate_loss=True)])

    assert any("loss" in warning for warning in plan.warnings)


@pytest.mark.parametrize("alpha", [-1, float("nan"), "high"])
def test_bad_settings(alpha):
    """An alpha out of range raises."""
    with pytest.raises((TypeError, ValueError), match="alpha"):
        CutMix(alpha=alpha)

"""CutMix: inputs of the model, targets of the loss, and draws."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from composer.algorithms import CutMix

SAMPLES = 8


@pytest.fixture
def numbered():
    """Images whose pixels all have the image's number, so that pasted areas can be inferred, and class ids."""
    images = torch.arange(SAMPLES).float().view(-1, 1, 1, 1).expand(-1, 1, 8, 8).contiguous()
    return images, torch.arange(SAMPLES) % 3


@pytest.fixture
def pixels(watch):
    """Return a model over the 64 pixels of an image."""
    return watch(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)))


def infer_boxes(mixed):
    """Return the pasted fraction of each image, and its source."""
    own = torch.arange(SAMPLES).view(-1, 1, 1, 1)
    pasted = mixed != own
    fraction = pasted.float().mean((1, 2, 3))
    partners = torch.where(pasted.any(1).any(1).any(1), (mixed * pasted).amax((1, 2, 3)).long(), own.flatten())
    zero = pasted.flatten(1).any(1) & ((mixed * pasted).amax((1, 2, 3)) == 0)
    return fraction, torch.where(zero, torch.zeros_like(partners), partners)


@pytest.mark.parametrize("soft", [False, True])
def test_targets_are_blended_by_area(soft, pixels, make_engine, step, numbered, one_hot):
    """Targets are weighted by area, for class ids and for probabilities."""
    images, ids = numbered
    targets = torch.rand(SAMPLES, 3).softmax(1) if soft else ids

    step(make_engine(pixels, CutMix()), (images, targets))

    fraction, partners = infer_boxes(pixels.seen.inputs[0])
    probabilities = targets if soft else one_hot(ids)
    area = fraction.max()
    expected = (1 - area) * probabilities + area * probabilities[partners]
    moved = fraction > 0
    assert 0 < area < 1
    assert torch.allclose(pixels.seen.targets[0][moved], expected[moved], atol=1e-6)


def test_losses_are_blended_by_area(pixels, make_engine, step, numbered):
    """With interpolate_loss the losses of both class ids are weighted by area."""
    images, ids = numbered
    engine = make_engine(pixels, CutMix(interpolate_loss=True))

    state = step(engine, (images, ids))

    outputs, (own, partner) = pixels.seen.outputs[0], pixels.seen.targets
    area = infer_boxes(pixels.seen.inputs[0])[0].max()
    expected = (1 - area) * cross_entropy(outputs, own) + area * cross_entropy(outputs, partner)
    assert not own.is_floating_point()
    assert torch.allclose(state.loss, expected)
    assert torch.equal(state.batch[1], ids)


def test_loader_batch_is_not_modified(pixels, make_engine, step, numbered):
    """The loader's tensors are not modified."""
    images, ids = numbered[0].clone(), numbered[1].clone()

    step(make_engine(pixels, CutMix()), numbered)

    assert torch.equal(numbered[0], images)
    assert torch.equal(numbered[1], ids)

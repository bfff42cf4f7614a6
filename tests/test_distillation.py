"""Distillation of the models of this library, and of Transformers."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from composer import functional as cf
from composer.algorithms import Distillation
from composer.core import Engine, State
from composer.models import ComposerClassifier, ComposerRegressor, ComposerSegmenter, HuggingFaceModel
from fixtures.models import make_network


def soft_loss(model, algorithm, batch):
    """Return the loss of a batch with a teacher of weight 1."""
    state = State(model)
    engine = Engine(state, algorithms=algorithm)
    engine.run_event("fit_start")
    state.batch, state.outputs, state.loss = batch, model(batch), torch.zeros(())
    engine.run_event("after_forward")
    engine.run_event("after_loss")
    engine.close()
    return state.loss


@pytest.mark.parametrize("ignored", [255, -1])
def test_ignored_class_id(ignored):
    """Pixels with the id that the model's loss ignores teach nothing."""
    torch.manual_seed(0)
    model, teacher = (ComposerSegmenter(nn.Conv2d(3, 4, 1), ignore_index=ignored) for _ in range(2))
    images, masks = torch.rand(2, 3, 4, 4), torch.randint(4, (2, 4, 4))
    masks[:, :, :3] = ignored
    with torch.no_grad():
        logits = [one((images, masks)) for one in (model, teacher)]

    loss = soft_loss(model, Distillation(teacher, weight=1.0), (images, masks))

    torch.testing.assert_close(loss, cf.distillation_loss(*logits, masks, weight=1.0, ignore_index=ignored))


def test_masks_of_transformers():
    """Scores of pixels are resized to the masks as in Transformers' loss; those that are ignored do not count."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_sizes": [8, 8], "num_attention_heads": [1, 1], "depths": [1, 1], "sr_ratios": [1, 1]}
    config = transformers.SegformerConfig(num_labels=5, num_encoder_blocks=2, decoder_hidden_size=8, **sizes)
    networks = [transformers.SegformerForSemanticSegmentation(config).eval() for _ in range(2)]
    for network in networks:
        nn.init.normal_(network.decode_head.classifier.weight, std=100)
    student, teacher = map(HuggingFaceModel, networks)
    masks = torch.randint(5, (2, 32, 32))
    masks[:, :9] = 255
    batch = {"pixel_values": torch.rand(2, 3, 32, 32), "labels": masks}
    with torch.no_grad():
        logits = [one(batch)["logits"] for one in (student, teacher)]
    assert logits[0].shape[2:] != masks.shape[1:]
    resized = [F.interpolate(one, size=(32, 32), mode="bilinear", align_corners=False) for one in logits]

    loss = soft_loss(student, Distillation(teacher, weight=1.0, temperature=1.0), batch)

    torch.testing.assert_close(loss, cf.distillation_loss(*resized, masks, 1.0, 1.0, ignore_index=255))


@pytest.mark.parametrize("kind", ["kl", "mse"])
def test_one_score(kind):
    """Scores ``(N,)`` of two classes are as those of ``(N, 1)``."""
    student, teacher, losses = nn.Linear(4, 1), nn.Linear(4, 1), []
    batch = torch.randn(4, 4), torch.tensor([0, 1, 1, 0])
    for end in (nn.Identity(), nn.Flatten(0)):
        model = ComposerClassifier(nn.Sequential(student, end), num_classes=2)
        losses.append(soft_loss(model, Distillation(nn.Sequential(teacher, end), weight=1.0, kind=kind), batch))

    torch.testing.assert_close(*losses)
    assert losses[0] > 0


@pytest.mark.parametrize(
    ("make", "target", "kind", "warns"),
    [
        (lambda: ComposerClassifier(make_network(), 3, loss_fn=nn.BCEWithLogitsLoss()), "labels", "kl", True),
        (lambda: ComposerClassifier(make_network(), 3, loss_fn=nn.BCEWithLogitsLoss()), "labels", "mse", False),
        (lambda: ComposerRegressor(make_network()), "labels", "kl", True),
        (lambda: ComposerClassifier(make_network()), "probabilities", "kl", False),
        (lambda: ComposerClassifier(make_network()), "ids", "kl", False),
    ],
)
def test_scores_that_are_independent(make, target, kind, warns):
    """A softmax over labels or values that do not exclude each other gives one warning, with what to set."""
    labels = torch.tensor([[1.0, 1, 0], [0, 0, 0], [0, 1, 0], [1, 1, 1]])
    targets = {"labels": labels, "probabilities": torch.rand(4, 3).softmax(1), "ids": torch.tensor([0, 1, 2, 0])}
    model, algorithm = make(), Distillation(copy.deepcopy(make_network()), weight=1.0, kind=kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            soft_loss(model, algorithm, (torch.rand(4, 4), targets[target]))

    assert len([one for one in caught if "Set kind='mse'" in str(one.message)]) == warns

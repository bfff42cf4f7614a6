"""The contrastive loss against loops over the samples, in double precision."""

import math

import pytest
import torch
from torch.nn.functional import cosine_similarity, cross_entropy

from composer import functional as cf

VIEWS = torch.arange(12) // 2
CLASSES = torch.tensor([0, 1, 0, 2, 2, 2, 0, 1, 1, 0, 2, 7])  # the last one has no other sample


def loop_over_samples(embeddings, labels, temperature):
    """The definition of the supervised contrastive loss, equation 2 of arXiv:2004.11362, with Python's numbers."""
    similarity = (cosine_similarity(embeddings[:, None], embeddings, dim=-1) / temperature).tolist()
    total = 0.0
    for i, row in enumerate(similarity):
        rest = [k for k in range(len(row)) if k != i]
        positives = [k for k in rest if labels[k] == labels[i]]
        denominator = sum(math.exp(row[k]) for k in rest)
        total -= sum(math.log(math.exp(row[p]) / denominator) for p in positives) / max(1, len(positives))
    return total / len(similarity)


@pytest.mark.parametrize("labels", [VIEWS, CLASSES])
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_definition(labels, temperature):
    """The loss is that of a loop over samples, with two views each, and with classes."""
    embeddings = torch.randn(12, 5, dtype=torch.float64)

    loss = cf.contrastive_loss(embeddings, labels, temperature)

    assert loss.item() == pytest.approx(loop_over_samples(embeddings, labels.tolist(), temperature), rel=1e-12)


def test_two_views_are_a_classification():
    """NT-Xent is the cross entropy of finding the other view among all other samples (arXiv:2002.05709)."""
    embeddings = torch.nn.functional.normalize(torch.randn(12, 5, dtype=torch.float64))
    scores = (embeddings @ embeddings.T / 0.2).fill_diagonal_(-math.inf)

    expected = cross_entropy(scores, torch.arange(12) ^ 1)

    torch.testing.assert_close(cf.contrastive_loss(embeddings, VIEWS, 0.2), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("labels", [VIEWS, CLASSES])
def test_gradient(labels):
    """The gradient is that of finite differences, also of a sample without another one of its label."""
    embeddings = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda one: cf.contrastive_loss(one, labels, 0.3), embeddings)


def test_parts_have_the_mean_of_the_whole():
    """Parts of a batch that are compared with all have the loss and the gradients of the batch."""
    embeddings = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    whole = cf.contrastive_loss(embeddings, CLASSES)
    parts = [
        cf.contrastive_loss(
            embeddings[a:b], CLASSES[a:b], candidates=embeddings, candidate_labels=CLASSES, first=a
        ) * (b - a) / 12
        for a, b in [(0, 3), (3, 4), (4, 12)]
    ]  # fmt: skip

    expected, gradients = (torch.autograd.grad(loss, embeddings)[0] for loss in (whole, sum(parts)))

    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)


def test_low_precision_is_computed_in_float32():
    """Embeddings of 16 bits give the loss of the same numbers in float32."""
    embeddings = torch.randn(12, 4).bfloat16()

    assert torch.equal(cf.contrastive_loss(embeddings, VIEWS), cf.contrastive_loss(embeddings.float(), VIEWS))


def test_autocast_changes_nothing():
    """Autocast computes no product in 16 bits, whatever the dtype of the embeddings."""
    embeddings = torch.randn(12, 4, requires_grad=True)
    losses = [cf.contrastive_loss(embeddings, VIEWS)]
    with torch.autocast("cpu", torch.bfloat16):
        losses.append(cf.contrastive_loss(embeddings, VIEWS))

    gradients = [torch.autograd.grad(loss, embeddings)[0] for loss in losses]

    assert torch.equal(*losses)
    assert torch.equal(*gradients)

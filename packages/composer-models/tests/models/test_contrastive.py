"""ComposerContrastive: the split of a batch does not change the loss."""

import pytest
import torch
from torch import nn

from composer.functional import contrastive_loss
from composer.models import ComposerContrastive


def network(*layers):
    """A small module with dropout, in double precision."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.ReLU(), nn.Linear(16, 4)).double()


def step(model, batch):
    """The loss and the gradients of a batch, with the draws of a seed."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model.loss(model(batch), batch)
    loss.backward()
    return loss, torch.cat([one.grad.flatten() for one in model.parameters()])


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize("size", [1, 3, 10, 64])
def test_parts_give_the_step_of_the_batch(size, supervised):
    """Embeddings of a few samples at a time give the gradients of all at once."""
    batch = torch.randn(10, 2, 6, dtype=torch.float64), torch.arange(10) % 3
    expected, gradients = step(ComposerContrastive(network(), supervised=supervised), batch)

    model = ComposerContrastive(network(), supervised=supervised)
    (whole,) = model.split_batch(batch, size)
    loss, actual = step(model, whole)

    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(actual, gradients, rtol=0, atol=1e-12)


def test_draws_of_a_part_are_repeated():
    """Dropout draws the same when a part is computed again: the gradient is that of the loss, by finite differences."""
    model = ComposerContrastive(network(nn.Dropout(0.3)), microbatch_size=2)
    batch = torch.randn(6, 2, 6, dtype=torch.float64)
    _, gradients = step(model, batch)
    direction = torch.randn_like(gradients)

    losses = []
    for distance in (1e-5, -1e-5):
        with torch.no_grad():
            weights = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(weights + distance * direction, model.parameters())
        losses.append(step(model, batch)[0])
        nn.utils.vector_to_parameters(weights, model.parameters())

    torch.testing.assert_close((losses[0] - losses[1]).detach() / 2e-5, gradients @ direction, rtol=1e-6, atol=0)


def test_memory_is_that_of_a_part():
    """No more than a part's activations exist at a time."""
    module, largest = network(), []
    module[0].register_forward_hook(lambda _module, inputs, _output: largest.append(len(inputs[0])))

    step(ComposerContrastive(module, microbatch_size=3), torch.randn(8, 2, 6, dtype=torch.float64))

    assert largest[:3] == [6, 6, 4]
    assert sorted(largest[3:]) == [4, 6, 6]


def test_labels_are_classes_if_supervised():
    """With labels, samples of one class are near each other, also with one view."""
    model, labels = ComposerContrastive(network(), 0.5, supervised=True), torch.arange(10) % 3
    batch = torch.randn(10, 1, 6, dtype=torch.float64), labels
    outputs = model(batch)

    assert torch.equal(model.loss(outputs, batch), contrastive_loss(outputs, labels, 0.5))


def test_evaluation_returns_an_embedding_for_each_sample():
    """In evaluation a batch has samples and no views."""
    model, samples = ComposerContrastive(network(), microbatch_size=2).eval(), torch.randn(5, 6, dtype=torch.float64)

    assert torch.equal(model((samples, torch.arange(5))), model.module(samples))


def test_one_sample():
    """A last batch of one sample has no loss in evaluation; in training the error names the loader's setting."""
    model = ComposerContrastive(network(), supervised=True)
    batch = torch.randn(1, 1, 6, dtype=torch.float64), torch.tensor([3])

    with pytest.raises(ValueError, match="drop_last=True"):
        model.loss(model(batch), batch)

    model.eval()
    (metric,) = model.get_metrics(is_train=False).values()
    for samples in (torch.randn(3, 6, dtype=torch.float64), batch[0][0]):
        few = samples, torch.full((len(samples),), 3)
        outputs = model(few)
        model.update_metric(few, outputs, metric)
    assert model.loss(outputs, few).item() == 0
    assert metric.compute().item() > 0


def test_only_its_own_split_keeps_the_loss():
    """A trainer is warned of its split, unless the model splits."""
    model = ComposerContrastive(network(), microbatch_size=2)
    assert model.loss_needs_whole_batch

    model.split_batch(torch.zeros(4, 2, 6), 3)

    assert (model.loss_needs_whole_batch, model.microbatch_size) == (False, 3)


def test_batchnorm_cannot_be_split():
    """BatchNorm would normalize by the samples of a part."""
    model = ComposerContrastive(network(nn.BatchNorm1d(16)), microbatch_size=2)

    with pytest.raises(ValueError, match="microbatch_size requires a module without BatchNorm in training"):
        model(torch.zeros(4, 2, 6, dtype=torch.float64))

    assert model.eval()(torch.zeros(4, 6, dtype=torch.float64)).shape == (4, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"module": len}, TypeError, "module must be"),
        ({"microbatch_size": 0}, ValueError, "microbatch_size must be at least 1, got 0"),
        ({"microbatch_size": 2.5}, TypeError, "microbatch_size must be an int"),
    ],
)
def test_errors(arguments, error, words):
    """Arguments that cannot work raise an error that names them."""
    with pytest.raises(error, match=words):
        ComposerContrastive(**{"module": network()} | arguments)

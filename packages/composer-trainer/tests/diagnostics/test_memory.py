"""The memory of a step."""

import pytest
import torch
from torch import nn

from composer.diagnostics import estimate_memory, summary
from composer.models import ComposerClassifier
from fixtures import small_run


def make_images(**options):
    """Return a trainer of a small convolutional network with batch norm and dropout."""
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(8 * 16, 3),
    )
    data = [(torch.rand(10, 1, 8, 8), torch.randint(3, (10,)))] * 2
    model = ComposerClassifier(network, num_classes=3)
    return small_run(
        model=model,
        train_dataloader=data,
        optimizers=torch.optim.Adam(model.parameters()),
        max_duration="1ep",
        **options,
    )


class TestMemory:
    def test_weights_gradients_and_batch(self):
        """Bytes of weights, gradients, buffers and the batch are those of their tensors."""
        memory = estimate_memory(make_images())

        parameters = 8 * 9 + 8 + 8 + 8 * 16 * 3 + 3
        assert (memory["parameters"], memory["gradients"]) == (4 * parameters, 4 * parameters)
        assert memory["buffers"] == 4 * 16 + 8
        assert memory["batch"] == 10 * 64 * 4 + 10 * 8

    def test_activations_grow_with_the_microbatch(self):
        """The memory is that of one microbatch."""
        whole, half = (estimate_memory(make_images(device_train_microbatch_size=size)) for size in (None, 5))

        assert half["activations"] == pytest.approx(whole["activations"] / 2, rel=0.1)


class TestNothingStaysChanged:
    def test_training_is_bit_identical(self):
        """A summary before and in the middle of a training changes no weight, buffer, gradient or draw."""
        trained = []
        for summarizes in (False, True):
            torch.manual_seed(0)
            trainer = make_images()
            for _ in range(2):
                if summarizes:
                    summary(trainer)
                trainer.fit(duration="2ba")
            trained.append((trainer.state.model.state_dict(), torch.get_rng_state()))

        (plain, draws), (summarized, same_draws) = trained
        assert all(torch.equal(plain[name], summarized[name]) for name in plain)
        assert torch.equal(draws, same_draws)


class TestEstimateMemory:
    @pytest.mark.parametrize(("batch_size", "given"), [(64, 64), (64, 16)])
    def test_equals_what_a_step_allocates(self, batch_size, given):
        """The sum is within 10 % of the peak that torch's tracker of tensors measures in a step with Adam."""
        from torch.distributed._tools.mem_tracker import MemTracker

        network = nn.Sequential(
            *[part for _ in range(4) for part in (nn.Linear(256, 256), nn.GELU())], nn.Linear(256, 4)
        )
        model = ComposerClassifier(network, num_classes=4)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
        data = torch.rand(given, 256), torch.randint(4, (given,))
        trainer = small_run(model=model, optimizers=optimizer, train_dataloader=None)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

        estimate = estimate_memory(trainer, batch_size, sample_input=data)

        assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
        assert not optimizer.state
        inputs, targets = torch.rand(batch_size, 256), torch.randint(4, (batch_size,))
        tracker = MemTracker()
        tracker.track_external(network, optimizer, inputs)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                torch.nn.functional.cross_entropy(network(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        (peak,) = (parts["Total"] for parts in tracker.get_tracker_snapshot("peak").values())
        assert estimate["total"] == pytest.approx(peak, rel=0.1)

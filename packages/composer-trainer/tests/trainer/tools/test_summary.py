"""The summary of a model: its layers, and the memory of a batch."""

import pytest
import torch
from torch import nn

from composer.algorithms import BlurPool
from composer.models import ComposerClassifier
from composer.trainer import estimate_memory
from fixtures import make_classifier, small_run


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


class TestLayers:
    def test_paths_classes_and_shapes(self):
        """Each module has its class, and the shapes of its input and output; the model has those of the batch."""
        summary = small_run().summary()

        assert [(one.path, one.kind, one.output) for one in summary.layers[:1] + summary.layers[-4:]] == [
            ("", "ComposerClassifier", "float32[4, 3]"),
            ("module", "Sequential", "float32[4, 3]"),
            ("module.0", "Linear", "float32[4, 8]"),
            ("module.1", "ReLU", "float32[4, 8]"),
            ("module.2", "Linear", "float32[4, 3]"),
        ]
        assert summary.layers[0].input == summary.batch == "[float32[4, 4], int64[4]]"
        assert summary.layers[-1].input == "float32[4, 8]"

    def test_parameters(self):
        """Parameters are counted with those of children, and apart from frozen ones."""
        trainer = small_run()
        trainer.state.model.module[0].bias.requires_grad_(False)

        summary = trainer.summary()

        counts = {one.path: one.num_parameters for one in summary.layers}
        assert (counts["module.0"], counts["module.2"], counts["module"], counts[""]) == (40, 27, 67, 67)
        assert (summary.num_parameters, summary.num_trainable) == (67, 59)

    def test_surgery(self):
        """A replaced layer names its algorithm and the former class."""
        summary = make_images(algorithms=BlurPool(min_channels=1)).summary()

        replaced = {one.path: one.replaced for one in summary.layers if one.replaced}
        assert replaced == {"module.0": "BlurPool (was Conv2d)"}
        assert "BlurPool (was Conv2d)" in str(summary)

    def test_depth(self):
        """Deeper modules are left out of the list, and counted in their parents."""
        summary = small_run().summary(max_depth=1)

        assert {one.path.count(".") for one in summary.layers} == {0}
        assert summary.num_parameters == 67

    def test_prints_as_a_table(self):
        """Each layer has a line, below it are the totals."""
        lines = str(small_run().summary()).splitlines()

        assert lines[0].split() == ["LAYER", "CLASS", "INPUT", "OUTPUT", "PARAMETERS"]
        assert [line.split()[:2] for line in lines if line.strip().startswith("0 ")] == [["0", "Linear"]]
        assert "parameters: 67, of which 67 are trained" in lines
        assert "batch: [float32[4, 4], int64[4]]" in lines


class TestMemory:
    def test_weights_gradients_and_batch(self):
        """Bytes of weights, gradients, buffers and the batch are those of their tensors."""
        trainer = make_images()

        memory = trainer.summary().memory

        parameters = 8 * 9 + 8 + 8 + 8 * 16 * 3 + 3
        assert (memory["parameters"], memory["gradients"]) == (4 * parameters, 4 * parameters)
        assert memory["buffers"] == 4 * 16 + 8
        assert memory["batch"] == 10 * 64 * 4 + 10 * 8

    def test_optimizer_state(self):
        """The state of Adam is counted once there is one."""
        trainer = make_images()
        before = trainer.summary().memory["optimizer state"]
        trainer.fit()

        after = trainer.summary().memory

        assert before == 0
        assert after["optimizer state"] == 2 * after["parameters"] + 4 * 5

    def test_activations_of_known_layers(self):
        """What two linear layers and a ReLU store is the input of the second layer, and the log-probabilities."""
        trainer = small_run()

        memory = trainer.summary().memory

        assert memory["activations"] == pytest.approx(4 * (4 * 8 + 4 * 3), abs=64)

    def test_activations_grow_with_the_microbatch(self):
        """The memory is that of one microbatch."""
        whole, half = (make_images(device_train_microbatch_size=size).summary() for size in (None, 5))

        assert half.batch == "(float32[5, 1, 8, 8], int64[5])"
        assert half.memory["activations"] == pytest.approx(whole.memory["activations"] / 2, rel=0.1)


class TestNothingStaysChanged:
    def test_training_is_bit_identical(self):
        """A summary before and in the middle of a training changes no weight, buffer, gradient or draw."""
        trained = []
        for summarizes in (False, True):
            torch.manual_seed(0)
            trainer = make_images()
            for _ in range(2):
                if summarizes:
                    trainer.summary()
                trainer.fit(duration="2ba")
            trained.append((trainer.state.model.state_dict(), torch.get_rng_state()))

        (plain, draws), (summarized, same_draws) = trained
        assert all(torch.equal(plain[name], summarized[name]) for name in plain)
        assert torch.equal(draws, same_draws)

    def test_hooks_and_modes(self):
        """No hook stays, and a module in evaluation mode stays in it."""
        trainer = make_images()
        trainer.state.model.module[3].eval()

        trainer.summary()

        modules = list(trainer.state.model.modules())
        assert not any(module._forward_hooks for module in modules)
        assert [module.training for module in modules].count(False) == 1

    def test_error_of_the_model(self):
        """An error names the batch, and leaves no hook."""
        trainer = make_images()

        with pytest.raises(RuntimeError) as caught:
            trainer.summary((torch.rand(2, 3), torch.zeros(2)))

        assert "with the batch (float32[2, 3], float32[2])" in caught.value.__notes__[0]
        assert not any(module._forward_hooks for module in trainer.state.model.modules())


def test_in_a_notebook():
    """The table has the layers, and the totals above them."""
    summary = small_run().summary()

    html = summary._repr_html_()

    assert html.count("<tr>") == 1 + len(summary.layers)
    assert f"of which {summary.num_trainable:,} are trained\nbatch" in html


def test_sample_input():
    """A given batch is used instead of the data's first one."""
    summary = small_run(train_dataloader=None).summary((torch.rand(7, 4), torch.zeros(7, dtype=torch.long)))

    assert summary.batch == "(float32[7, 4], int64[7])"


def test_no_batch():
    """Without data and sample there is no batch."""
    with pytest.raises(ValueError, match="There is no batch to compute: give sample_input"):
        small_run(train_dataloader=None).summary()


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

    def test_optimizer_state(self):
        """Adam has two numbers for each weight and one step for each tensor; SGD without momentum has none."""
        for make, numbers in ((torch.optim.SGD, 0), (torch.optim.Adam, 2)):
            model = make_classifier()
            trainer = small_run(model=model, optimizers=make(model.parameters(), lr=0.1))

            memory = estimate_memory(trainer)

            steps = 4 * len(list(model.parameters())) if numbers else 0
            assert memory["optimizer state"] == numbers * memory["parameters"] + steps

    def test_half_precision_stores_less(self):
        """With autocast to bfloat16, activations take less memory, and weights the same."""
        trainer = small_run()

        full, half = estimate_memory(trainer, 256), estimate_memory(trainer, 256, "amp_bf16")

        assert half["activations"] < full["activations"]
        assert half["parameters"] == full["parameters"]
        assert trainer.state.precision.value == "fp32"


def test_estimate_of_a_model_raises():
    """A model in place of the trainer is named in the error."""
    with pytest.raises(TypeError, match="trainer must be a Trainer, which has the model and its data, got Linear"):
        estimate_memory(nn.Linear(2, 2))

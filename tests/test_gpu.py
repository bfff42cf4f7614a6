"""Training on a CUDA device: the same results as on a CPU, no synchronization in a step, exact resume."""

import copy
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import composer.algorithms as al
from composer import Callback
from composer import functional as cf
from fixtures import make_classifier, small_run

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
STEPS = 8


def network():
    """A small convolutional network, with the same weights each time."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 8 * 8, 10))


def loader(**options):
    """Eight batches of 16 images in pinned memory."""
    draw = torch.Generator().manual_seed(1)
    images = torch.rand(STEPS * 16, 3, 16, 16, generator=draw)
    labels = torch.randint(10, (STEPS * 16,), generator=draw)
    return DataLoader(TensorDataset(images, labels), batch_size=16, pin_memory=True, **options)


def trainer(algorithms=(), *, precision="fp32", max_duration="1ep", **options):
    """A Trainer on the GPU, with SGD."""
    model = make_classifier(network(), num_classes=10)
    settings = {"train_dataloader": loader(shuffle=True), "seed": 3, "max_duration": max_duration} | options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = {"model": model, "optimizers": optimizer, "algorithms": algorithms}
    return small_run(device="gpu", precision=precision, **training, **settings)


def padded_sequences():
    """A small model of sequences with a label for each place, some of which are ignored, in microbatches of four."""
    torch.manual_seed(0)
    model = make_classifier(nn.Conv1d(3, 10, 3, padding=1), num_classes=10, train_metrics=[])
    labels = torch.randint(10, (STEPS * 8, 12)).where(torch.arange(12) < torch.randint(3, 12, (STEPS * 8, 1)), -100)
    data = TensorDataset(torch.rand(STEPS * 8, 3, 12), labels)
    batches = DataLoader(data, batch_size=8, pin_memory=True)
    return {"model": model, "train_dataloader": batches, "device_train_microbatch_size": 4, "max_duration": "1ep"}


class ForbidSynchronization(Callback):
    """Raises an error if the host synchronizes with the device, from the third batch on."""

    def batch_start(self, state, logger):
        """Skip the first batches, which load kernels and select algorithms."""
        torch.cuda.set_sync_debug_mode("error" if state.timestamp.batch >= 2 else "default")

    def batch_end(self, state, logger):
        """Check only the step."""
        torch.cuda.set_sync_debug_mode("default")

    def close(self, state, logger):
        """Reset the mode, also after an error."""
        torch.cuda.set_sync_debug_mode("default")


ON_BATCHES = {
    "cutmix": lambda images, labels: cf.cutmix_batch(images, labels, bbox=(2, 2, 9, 9), indices=labels.argsort())[0],
    "cutout": lambda images, labels: cf.cutout_batch(images, boxes=[(2, 2, 9, 9)]),
    "mixup": lambda images, labels: cf.mixup_batch(images, labels, mixing=0.3, indices=labels.argsort())[0],
    "smooth_labels": lambda images, labels: cf.smooth_labels(images[:, 0, 0], labels % 10, smoothing=0.1),
}

RECIPES = {
    "none": list,
    "five": lambda: [al.BlurPool(), al.ChannelsLast(), al.LabelSmoothing(0.1), al.MixUp(0.2), al.EMA("4ba")],
    "spikes": lambda: [al.SkipSpikes("3std", 4)],
    "cutmix": lambda: [al.CutMix(), al.GradientClipping("norm", 1.0)],
    "swa": lambda: [al.GradientClipping("adaptive", 0.1), al.CutOut(), al.SWA(swa_start="3ba", update_interval="1ba")],
}


class TestKernels:
    @pytest.mark.parametrize("name", ON_BATCHES)
    def test_equal_those_on_the_cpu(self, name):
        """The results are equal up to rounding if the same draws are passed in."""
        images, labels = torch.rand(16, 3, 16, 16), torch.randperm(16)

        expected = ON_BATCHES[name](images, labels)

        result = ON_BATCHES[name](images.to(DEVICE), labels.to(DEVICE))
        assert result.device.type == DEVICE
        torch.testing.assert_close(result.cpu(), expected)

    @pytest.mark.parametrize("draw", [cf.augmix_batch, cf.colout_batch, cf.cutout_batch, cf.randaugment_batch])
    def test_draw_as_on_the_cpu(self, draw):
        """One seed draws the same for both devices; pixels of 8 bits differ by rounding at most."""
        images = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)

        expected = draw(images, generator=torch.Generator().manual_seed(5))

        result = draw(images.to(DEVICE), generator=torch.Generator().manual_seed(5)).cpu()
        difference = (result.int() - expected.int()).abs()
        assert (difference <= 2).float().mean() > 0.99

    @pytest.mark.parametrize(
        "surgery",
        [cf.apply_blurpool, cf.apply_channels_last, cf.apply_ghost_batchnorm, cf.apply_weight_standardization],
    )
    def test_surgery(self, surgery):
        """A changed model has the same outputs and gradients on the GPU and on the CPU."""
        model = network()
        model[4].p = 0.0
        surgery(model)
        on_gpu = copy.deepcopy(model).to(DEVICE)
        images, labels = torch.rand(32, 3, 16, 16), torch.randint(10, (32,))

        cross_entropy(model(images), labels).backward()

        cross_entropy(on_gpu(images.to(DEVICE)), labels.to(DEVICE)).backward()
        for (name, actual), expected in zip(on_gpu.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(actual.grad.cpu(), expected.grad, rtol=2e-2, atol=1e-4, msg=name)


class TestStep:
    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
    def test_never_waits_for_the_device(self, recipe, precision):
        """No operation between the start and the end of a batch reads a value from the GPU."""
        with trainer(RECIPES[recipe](), precision=precision, callbacks=ForbidSynchronization()) as run:
            run.fit()

        assert run.state.timestamp.batch == STEPS

    def test_equals_a_plain_loop(self):
        """The same batches, drawn the same way, give bit-identical weights."""
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        try:
            run = trainer(train_dataloader=loader(), device_train_microbatch_size=None)
            run.state.model.module[4].p = 0.0
            run.fit()
            model = network().to(DEVICE)
            model[4].p = 0.0
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            for images, labels in loader():
                optimizer.zero_grad()
                cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE)).backward()
                optimizer.step()
        finally:
            torch.use_deterministic_algorithms(mode=False)

        for actual, expected in zip(run.state.model.module.parameters(), model.parameters(), strict=True):
            assert torch.equal(actual, expected)

    def test_peak_memory_is_that_of_a_plain_loop(self):
        """The trainer keeps no graph and no batch longer than the loop does."""

        def peak(train):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            train()
            return torch.cuda.max_memory_allocated() - before

        def loop():
            model = network().to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            for images, labels in loader():
                optimizer.zero_grad()
                loss = cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE))
                loss.backward()
                optimizer.step()

        loop()  # libraries allocate their workspace once

        assert peak(lambda: trainer().fit()) <= 1.1 * peak(loop) + 2**20

    def test_loss_scaling(self):
        """With amp_fp16 the scaler is used, and training lowers the loss as in full precision."""
        losses = {}
        for precision in ("fp32", "amp_fp16"):
            with trainer(precision=precision, max_duration="6ep") as run:
                run.fit()
                images, labels = next(iter(loader()))
                with torch.no_grad():
                    output = run.state.model.module(images.to(DEVICE))
                losses[precision] = cross_entropy(output, labels.to(DEVICE)).item()
                assert (run.state.scaler is not None) == (precision == "amp_fp16")

        assert losses["amp_fp16"] == pytest.approx(losses["fp32"], rel=0.1)

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
    @pytest.mark.parametrize("algorithms", [(), (al.LabelSmoothing(0.1),)], ids=["none", "label smoothing"])
    def test_never_waits_for_counts_of_labels(self, algorithms):
        """Microbatches are weighted by their labels without reading a count from the GPU."""
        # The scaler of the default precision, amp_fp16, waits for the GPU.
        settings = padded_sequences() | {"algorithms": algorithms, "precision": "amp_bf16"}
        with small_run(device="gpu", **settings, callbacks=ForbidSynchronization()) as run:
            run.fit()

        assert run.state.timestamp.batch == STEPS

    @pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.AdamW, torch.optim.Rprop])
    def test_state_of_optimizers_is_on_the_device(self, optimizer):
        """Also if an optimizer creates its state in its constructor, before the model moves."""
        model = make_classifier(network(), num_classes=10)
        with small_run(
            model=model, train_dataloader=loader(), device="gpu", optimizers=optimizer(model.parameters())
        ) as run:
            run.fit(duration="2ba")

        (used,) = run.state.optimizers
        tensors = [one for state in used.state.values() for name, one in state.items() if name not in {"step", "prev"}]
        assert tensors
        assert {one.device.type for one in tensors if torch.is_tensor(one)} == {DEVICE}


class TestSkipSpikes:
    def run(self, kind, *algorithms, skipped=(), callbacks=(), **settings):
        """Train a linear model on twelve batches, of which the seventh is much too bright; return the run."""

        class Skipping(kind):
            calls = 0

            def step(self, closure=None):
                self.calls += 1
                return None if self.calls - 1 in skipped else super().step(closure)

        images, labels = torch.rand(12 * 16, 48, generator=torch.Generator().manual_seed(1)), torch.arange(192) % 10
        images[6 * 16 : 7 * 16] *= 1e4
        torch.manual_seed(0)
        model = make_classifier(nn.Linear(48, 10), num_classes=10, train_metrics=[])
        data = DataLoader(TensorDataset(images, labels), batch_size=16, pin_memory=True)
        options = {"device": "gpu", "precision": "fp32", "model": model, "train_dataloader": data}
        options |= {"optimizers": Skipping(model.parameters(), lr=0.01, **settings), "algorithms": algorithms}
        with small_run(**options, callbacks=callbacks, max_duration="1ep") as run:
            run.fit()
        return run

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
    @pytest.mark.parametrize(
        ("kind", "settings"),
        [
            (torch.optim.SGD, {"momentum": 0.9}),
            (torch.optim.AdamW, {"fused": True}),
            (torch.optim.AdamW, {"capturable": True}),
        ],
        ids=["SGD", "fused", "capturable"],
    )
    def test_skips_a_step_without_waiting(self, kind, settings):
        """The weights are those of a run without the step of the spike, and no step reads a value from the GPU."""
        expected = self.run(kind, skipped=[6], **settings).state.model.state_dict()

        run = self.run(kind, al.SkipSpikes("20std", 8), callbacks=ForbidSynchronization(), **settings)

        assert int(run.state.algorithms[0].state_dict()["num_spikes"]) == 1
        assert all(torch.equal(run.state.model.state_dict()[name], value) for name, value in expected.items())

    def test_state_on_the_host_is_rejected(self):
        """An optimizer that counts its steps on the CPU raises an error with the remedy."""
        with pytest.raises(ValueError, match="'step' in its state is on the host"):
            self.run(torch.optim.AdamW, al.SkipSpikes())


class TestAverages:
    @pytest.mark.parametrize("where", ["cpu", DEVICE])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_equal_those_on_the_cpu(self, where, dtype):
        """The average may be on the CPU while the model is on the GPU."""

        def average(device, place):
            model = network().to(device, dtype)
            ema, swa = (copy.deepcopy(model).to(place) for _ in range(2))
            for step in range(3):
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.add_(0.25 * (step + 1))
                cf.compute_ema(model, ema, smoothing=0.5)
                cf.compute_swa(model, swa, step)
            return [weight.cpu() for one in (ema, swa) for weight in one.parameters()]

        torch.testing.assert_close(average(DEVICE, where), average("cpu", "cpu"))

    def test_on_the_cpu_waits_once(self):
        """All copies to the CPU are started before the first is waited for."""
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))).to(DEVICE)
        average = copy.deepcopy(model).cpu()
        cf.compute_swa(model, average, 0)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            cf.compute_swa(model, average, 1)
            torch.cuda.set_sync_debug_mode("default")

        assert sum("synchronizing" in str(warning.message) for warning in caught) <= 2


class TestGhostBatchNorm:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_under_autocast(self, dtype):
        """A model in low precision trains under autocast."""
        model = network()
        cf.apply_ghost_batchnorm(model, 8)
        model.to(DEVICE, dtype)
        before = [buffer.clone() for buffer in model.buffers()]

        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(torch.rand(16, 3, 16, 16, device=DEVICE)).float().sum()
        loss.backward()

        assert any(not torch.equal(one, buffer) for one, buffer in zip(before, model.buffers(), strict=True))
        assert all(weight.grad.isfinite().all() for weight in model.parameters())


class TestResume:
    @pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16"])
    def test_is_exact(self, tmp_path, precision):
        """A run that stops in the middle of an epoch continues with bit-identical weights."""

        def run(duration, **options):
            algorithms = [al.BlurPool(), al.MixUp(0.2), al.EMA("4ba")]
            settings = {"deterministic_mode": True, "precision": precision} | options
            with trainer(algorithms, max_duration=duration, **settings) as made:
                made.fit()
                return made.state.model.state_dict(), made.save_checkpoint(str(tmp_path / f"{duration}-{len(options)}"))

        try:
            expected, _ = run("12ba")
            _, checkpoint = run("5ba")
            resumed, _ = run("12ba", load_path=checkpoint)
        finally:
            torch.use_deterministic_algorithms(mode=False)

        assert all(torch.equal(resumed[name], value) for name, value in expected.items())


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """What came out of training, saving and loading a model sharded by FSDP2, in a process of its own."""
    program = Path(__file__).parent / "sharded_on_gpu.py"
    command = [sys.executable, str(program), str(tmp_path_factory.mktemp("sharded"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env={**os.environ})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class TestSharded:
    def test_loss_scaling(self, sharded):
        """With amp_fp16 a sharded model learns as in full precision."""
        full, scaled = sharded["losses"]

        assert scaled == pytest.approx(full, abs=0.1)

    def test_overflow_skips_the_step(self, sharded):
        """A batch with infinite gradients halves the scale and changes no weight; the others change them."""
        scales, weights = sharded["scales"], sharded["weights"]

        assert scales[6] == scales[5] / 2
        assert weights[6] == weights[5]
        assert weights[5] != weights[4]
        assert weights[7] != weights[6]

    def test_checkpoints_need_no_memory_of_the_device_to_save(self, sharded):
        """Also in the background; a quarter of the shard is allowed."""
        assert max(sharded["save"], sharded["background"]) <= sharded["shard"] / 4

    def test_checkpoints_need_a_shard_to_load(self, sharded):
        """Nothing of the run changes before all is read; a quarter more is allowed."""
        assert sharded["load"] <= 1.25 * sharded["shard"]

    def test_checkpoints_have_the_weights(self, sharded):
        """Also if the weights change while they are written."""
        assert sharded["equal"]
        assert sharded["equal in the background"]

"""Optimizers with a scaled loss, with closures, and with evaluation weights."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer.algorithms import SAM
from composer.core import Callback
from composer.loggers import InMemoryLogger
from composer.optim import DecoupledAdamW
from composer.trainer.optimization import check_optimizers
from fixtures import make_classifier, make_loader, small_run, weights


class Huge(Callback):
    """Makes one batch's gradients infinite, as a too large loss scale does."""

    def __init__(self, batch):
        """In this batch."""
        self.batch = batch

    def after_backward(self, state, logger):
        """Spoil them."""
        if int(state.timestamp.batch) == self.batch:
            next(state.model.parameters()).grad.fill_(float("inf"))


class TestScaledLoss:
    def test_schedule_after_a_skipped_first_step(self):
        """The warning of torch about the order of steps, which a user cannot change, does not come."""
        model = make_classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        trainer = small_run(
            model=model,
            optimizers=optimizer,
            schedulers=schedule,
            step_schedulers_every_batch=True,
            precision="amp_fp16",
            callbacks=Huge(0),
            max_duration="3ba",
        )

        trainer.fit()

        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)

    def test_skipped_steps_are_counted(self):
        """A step with infinite gradients does not change weights, and is counted and logged."""
        log = InMemoryLogger()
        trainer = small_run(precision="amp_fp16", callbacks=Huge(1), loggers=log, max_duration="3ba")
        found = []

        class RecordWeights(Callback):
            def batch_end(self, state, logger):
                found.append(weights(trainer))

        trainer.state.callbacks.append(RecordWeights())
        trainer.fit()

        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[1], found[2])
        assert [int(value) for _, value in log.data["trainer/skipped_steps"]] == [0, 1, 1]
        assert [float(value) for _, value in log.data["trainer/loss_scale"]] == [65536.0, 32768.0, 32768.0]

    @pytest.mark.parametrize("spoiled", [None, 0, 1])
    def test_several_optimizers(self, spoiled):
        """Each is unscaled and stepped once in a batch, the scale updated once after them; one may skip alone."""
        network = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in network]
        before = [[weight.clone() for weight in layer.parameters()] for layer in network]
        trainer = small_run(network=network, optimizers=optimizers, precision="amp_fp16")
        calls = []

        class Scaler(torch.amp.GradScaler):
            def unscale_(self, optimizer):
                calls.append(f"unscale {optimizers.index(optimizer)}")
                super().unscale_(optimizer)

            def step(self, optimizer):
                calls.append(f"step {optimizers.index(optimizer)}")
                super().step(optimizer)

            def update(self):
                calls.append("update")
                super().update()

        class Spoil(Callback):
            def after_backward(self, state, logger):
                if spoiled is not None:
                    network[spoiled].weight.grad.fill_(float("inf"))

        trainer.state.scaler = Scaler("cpu")
        trainer.state.callbacks.append(Spoil())
        trainer.fit(duration="1ba")

        changed = [
            any(not torch.equal(one, other) for one, other in zip(layer.parameters(), weights, strict=True))
            for layer, weights in zip(network, before, strict=True)
        ]
        assert calls == ["unscale 0", "unscale 1", "step 0", "step 1", "update"]
        assert changed == [spoiled != 0, spoiled != 1]
        assert trainer.state.scaler.get_scale() == (65536 if spoiled is None else 32768)

    def test_sam(self):
        """SAM trains with a scaled loss, close to the result without."""
        found = {}
        for precision in ("fp32", "amp_fp16"):
            trainer = small_run(precision=precision, algorithms=SAM(), max_duration="5ba")
            trainer.fit()
            found[precision] = weights(trainer)

        torch.testing.assert_close(found["amp_fp16"], found["fp32"], rtol=0.02, atol=0.005)

    def test_lbfgs_raises(self):
        """An optimizer with several loss computations and without support for scaling raises."""
        model = make_classifier()
        trainer = small_run(model=model, optimizers=torch.optim.LBFGS(model.parameters()), precision="amp_fp16")

        with pytest.raises(ValueError, match=r"LBFGS.*'fp32' or 'amp_bf16'"):
            trainer.fit(duration="1ba")


def test_second_derivatives_are_an_error():
    """An optimizer that needs the graph of the gradients is rejected when the Trainer is created."""
    optim = pytest.importorskip("timm.optim")
    model = make_classifier()

    with pytest.raises(ValueError, match="Adahessian needs second derivatives"):
        small_run(model=model, optimizers=optim.Adahessian(model.parameters()))


class TestEvaluationWeights:
    def schedule_free(self, **options):
        """Return a trainer with a schedule-free optimizer, and the optimizer."""
        schedulefree = pytest.importorskip("schedulefree", reason="it is an optional optimizer")
        model = make_classifier()
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
        return small_run(model=model, optimizers=optimizer, **options), optimizer

    def test_evaluation_uses_the_averages(self):
        """An evaluation uses the optimizer's averages and does not change training."""
        plain, _ = self.schedule_free()
        evaluated, optimizer = self.schedule_free()
        recorded = []

        class Observer(Callback):
            def eval_batch_start(self, state, logger):
                recorded.append((optimizer.param_groups[0]["train_mode"], weights(evaluated)))

        evaluated.state.callbacks.append(Observer())
        loader = DataLoader(TensorDataset(torch.rand(4, 4), torch.zeros(4, dtype=torch.int64)))

        plain.fit(duration="10ba")
        evaluated.fit(duration="10ba", eval_dataloader=loader, eval_interval="2ba", eval_subset_num_batches=1)

        assert len(recorded) == 5
        assert not any(mode for mode, _ in recorded)
        assert torch.equal(weights(plain), weights(evaluated))
        assert not torch.equal(recorded[-1][1], weights(evaluated))
        assert optimizer.param_groups[0]["train_mode"]


def test_default_optimizer():
    """Without an optimizer the default of MosaicML Composer trains: plain SGD, under the name of DecoupledSGDW."""
    models = [make_classifier() for _ in range(2)]
    default = small_run(model=models[0], optimizers=None, max_duration="1ep", eval_dataloader=make_loader())
    default.eval()  # without a warning
    plain = small_run(model=models[1], optimizers=torch.optim.SGD(models[1].parameters(), lr=0.1), max_duration="1ep")

    with pytest.warns(UserWarning, match=r"No optimizer was specified: training with DecoupledSGDW\(.*lr=0.1\)"):
        default.fit()
    plain.fit()

    assert type(default.state.optimizers[0]).__name__ == "DecoupledSGDW"
    assert torch.equal(weights(default), weights(plain))


class TestLostUpdates:
    def test_weights_in_bfloat16(self):
        """Updates that are rounded to bfloat16 give a warning; frozen weights and optimizers that keep them do not."""
        model = nn.Linear(2, 2).bfloat16()
        weights = [*model.parameters()]

        with pytest.warns(UserWarning, match=r"AdamW updates 2 parameters in bfloat16, where .*dtype=torch\.float32"):
            check_optimizers(model, [torch.optim.AdamW(weights)])
        check_optimizers(model, [DecoupledAdamW(weights, rounding="stochastic")])
        model.weight.requires_grad_(False)
        with pytest.warns(UserWarning, match="AdamW updates 1 parameters"):
            check_optimizers(model, [torch.optim.AdamW(weights)])

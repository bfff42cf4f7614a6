"""Optimizers with a scaled loss, with closures, and with evaluation weights."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer.algorithms import SAM
from composer.core import Callback
from composer.loggers import InMemoryLogger
from composer.trainer.optimization import move_state
from fixtures import make_classifier, make_loader, small_run, weights


def test_state_of_a_constructor_is_moved():
    """What has the shape of its parameter follows it to another device; the number of steps stays on the CPU."""
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = {"sum": torch.zeros(3), "step": torch.zeros(()), "count": 1}

    move_state(optimizer)

    assert {name: getattr(one, "device", None) for name, one in optimizer.state[parameter].items()} == {
        "sum": torch.device("meta"),
        "step": torch.device("cpu"),
        "count": None,
    }


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

    def test_an_optimizer_of_frozen_layers(self):
        """An optimizer whose weights have no gradients is stepped as in full precision, and the others train."""
        found = {}
        for precision in ("fp32", "amp_fp16"):
            torch.manual_seed(0)
            network = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
            network[0].requires_grad_(requires_grad=False)
            optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in network]
            trainer = small_run(network=network, optimizers=optimizers, precision=precision, max_duration="3ba")
            trainer.fit()
            found[precision] = weights(trainer)

        torch.testing.assert_close(found["amp_fp16"], found["fp32"], rtol=0.02, atol=0.005)

    @pytest.mark.parametrize("algorithms", [(), SAM()])
    @pytest.mark.parametrize("event", ["after_backward", "after_train_batch"])
    def test_no_gradients(self, event, algorithms):
        """A batch in which no optimizer has gradients, before or after they are unscaled, and the next ones train."""

        class Forget(Callback):
            def clear(self, state, logger):
                if int(state.timestamp.batch) == 1:
                    state.model.zero_grad()

        found = {}
        for precision in ("fp32", "amp_fp16"):
            forget = Forget()
            setattr(forget, event, forget.clear)
            trainer = small_run(
                precision=precision, callbacks=forget, algorithms=copy.deepcopy(algorithms), max_duration="3ba"
            )
            trainer.fit()
            found[precision] = weights(trainer)

        torch.testing.assert_close(found["amp_fp16"], found["fp32"], rtol=0.02, atol=0.005)

    def test_same_precision_keeps_the_scale(self):
        """fit(precision=) with the current precision keeps the loss scale."""
        trainer = small_run(precision="amp_fp16", callbacks=Huge(1), max_duration="3ba")
        trainer.fit()

        trainer.fit(precision="amp_fp16", duration="1ba")

        assert trainer.state.scaler.get_scale() == 32768

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

    @pytest.mark.parametrize("algorithms", [(), SAM()], ids=["alone", "in SAM"])
    def test_fused_momentum_raises(self, algorithms):
        """Torch's fused SGD creates momentum in uninitialized memory and does not fill it in a step that is skipped."""
        model = make_classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        options = {"model": model, "optimizers": optimizer, "algorithms": algorithms, "max_duration": "2ba"}

        with pytest.raises(ValueError, match="momentum and fused=True does not support precision='amp_fp16'"):
            small_run(precision="amp_fp16", **options).fit()

        small_run(precision="amp_bf16", **options).fit()

    def test_sgd_without_the_fused_option(self):
        """A subclass of SGD whose groups have no option ``fused`` trains with a scaled loss."""

        class PlainSGD(torch.optim.SGD):
            def __init__(self, params):
                torch.optim.Optimizer.__init__(self, params, {"lr": 0.1, "momentum": 0.9})

            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    torch._foreach_add_(group["params"], [one.grad for one in group["params"]], alpha=-group["lr"])

        found = []
        for make in (PlainSGD, partial(torch.optim.SGD, lr=0.1)):
            model = make_classifier()
            options = {"model": model, "optimizers": make(model.parameters()), "max_duration": "1ba"}
            small_run(precision="amp_fp16", **options).fit()
            found.append([*model.parameters()])

        torch.testing.assert_close(*found)


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

    def test_averages_equal_the_optimizers_eval_mode(self):
        """The evaluated weights are those of the optimizer's eval()."""
        trainer, optimizer = self.schedule_free()
        trainer.fit(duration="5ba")

        (outputs,) = trainer.predict([(torch.ones(2, 4), None)])
        optimizer.eval()
        with torch.no_grad():
            expected = trainer.state.model((torch.ones(2, 4), None))

        assert torch.equal(outputs, expected)


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

"""The gradients of a batch: their precision, and the draws of several computations in a step."""

import pytest
import torch
from torch import nn

from composer.algorithms import SAM
from composer.core import Callback
from composer.loggers import InMemoryLogger
from fixtures import make_classifier, small_run, weights


class TestPrecision:
    def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32(self):
        """Autocast covers the forward pass; weights stay in float32."""
        recorded = []

        class Observer(Callback):
            def after_forward(self, state, logger):
                recorded.append(state.outputs.dtype)

        trainer = small_run(precision="amp_bf16", callbacks=Observer(), max_duration="1ba")

        trainer.fit()

        assert recorded == [torch.bfloat16]
        assert {parameter.dtype for parameter in trainer.state.model.parameters()} == {torch.float32}

    def test_fp16_scales_the_loss_and_trains(self):
        """The loss is scaled, gradients are unscaled before algorithms run, and weights change."""
        sizes = []

        class Observer(Callback):
            def after_train_batch(self, state, logger):
                sizes.append(max(parameter.grad.abs().max().item() for parameter in state.model.parameters()))

        trainer = small_run(precision="amp_fp16", callbacks=Observer(), max_duration="1ba")
        before = weights(trainer)

        trainer.fit()

        assert trainer.state.scaler.get_scale() > 1
        assert sizes[0] < 10
        assert not torch.equal(before, weights(trainer))

    def test_unknown_precision_raises(self):
        """The error lists the precisions."""
        with pytest.raises(ValueError, match="precision must be one of fp32, amp_fp16"):
            small_run(precision="fp64")


def test_recomputed_batch_has_equal_draws():
    """A batch that an optimizer computes several times has equal draws, and its samples are counted once."""
    draws, counted = [], []

    class Draw(Callback):
        def before_forward(self, state, logger):
            draws.append(torch.rand((), generator=state.generator(self)).item())

        def batch_end(self, state, logger):
            counted.append(int(state.train_metrics["MulticlassAccuracy"]._update_count))

    model = make_classifier()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    small_run(model=model, optimizers=optimizer, callbacks=Draw(), max_duration="1ba").fit()

    assert len(draws) > 1
    assert len(set(draws)) == 1
    assert counted == [1]


class TestSAM:
    """SAM computes a step's gradients twice: at the weights, and at the worst weights nearby."""

    def test_dropout_is_equal_in_both_passes(self):
        """If both passes have equal weights, dropout gives equal outputs."""
        outputs = []

        class Note(Callback):
            def after_forward(self, state, logger):
                outputs.append(state.outputs.detach().clone())

        model = make_classifier()
        model.module.append(nn.Dropout(0.5))

        small_run(model=model, algorithms=SAM(rho=1e-30), callbacks=Note(), max_duration="2ba").fit()

        assert len(outputs) == 4
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[2], outputs[3])
        assert not torch.equal(outputs[0] == 0, outputs[2] == 0)

    def test_logged_loss_is_unperturbed(self):
        """The first batch's logged loss equals the loss without SAM."""
        losses = []
        for algorithms in ([], [SAM(rho=5.0)]):
            torch.manual_seed(0)
            logger = InMemoryLogger()
            small_run(algorithms=algorithms, loggers=logger, max_duration="1ba").fit()
            losses.append(logger.get_timeseries("loss/train/total")["loss/train/total"][0])

        assert losses[0] == losses[1]


def test_step_keeps_no_wrapper():
    """The step calls what the model is wrapped in now, so that an earlier wrapper is freed before the next one."""
    called = []

    class Rewrap(Callback):
        def batch_start(self, state, logger):
            trainer._parallel.forward = lambda batch: called.append(1) or state.model(batch)

    trainer = small_run(callbacks=Rewrap(), max_duration="1ba")

    trainer.fit()

    assert called == [1]

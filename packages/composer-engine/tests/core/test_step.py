"""The step of a batch: its events, the sums of its losses, repeated computations and errors."""

from functools import partial

import pytest
import torch
from torch import nn

from composer.core import SplitStep, State
from composer.core.event import STEP_EVENTS
from composer.core.step import Step, is_out_of_memory
from composer.functional import SAMOptimizer


def make(loss=lambda outputs: outputs.mean(), model=None, optimizer=torch.optim.SGD, **options):
    """Return a state, a step, and the events that it runs with the microbatch."""
    model = nn.Linear(1, 1) if model is None else model
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    state, seen = State(model, optimizers=optimizer(model.parameters(), lr=0.1)), []
    state.microbatch = -2

    calls = {event: (partial(lambda one: seen.append((one, state.microbatch)), event.value),) for event in STEP_EVENTS}
    return state, Step(state, calls, model, lambda outputs, _: loss(outputs), **options), seen


def batch_of(*values):
    """Return a batch of samples with one feature."""
    return torch.tensor(values)[:, None]


def test_events_in_the_order_of_the_drawing():
    """A step runs all events of a batch once, with the place in the step in state.microbatch."""
    state, step, seen = make()

    step.begin_batch(batch_of(1.0))
    state.optimizers[0].step(step.compute_gradients)
    step.end_batch(samples=1)

    assert [event for event, _ in seen] == [event.value for event in STEP_EVENTS[1:]]
    assert [place for _, place in seen] == [-1] * 3 + [0] * 7 + [-2] * 2
    assert state.timestamp.sample == "1sp"


def test_other_parts_of_a_loss_raise():
    """A microbatch whose loss has other parts than the one before names both."""
    parts = iter([{"a": 1, "b": 1}, {"a": 1}])
    state, step, _ = make(
        lambda outputs: {name: outputs.mean() for name in next(parts)},
        split=lambda: [(batch_of(1.0), 0.5), (batch_of(2.0), 0.5)],
    )
    state.batch = batch_of(1.0, 2.0)

    with pytest.raises(ValueError, match="same parts for all microbatches of a batch, got total, a after total, a, b"):
        step.compute_gradients()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda outputs: outputs.mean(), {"total": 2.5}),
        (lambda outputs: {"a": outputs.mean(), "b": 2 * outputs.mean()}, {"total": 7.5, "a": 2.5, "b": 5.0}),
        (lambda outputs: {"total": outputs.mean(), "b": 2 * outputs.mean()}, {"total": 2.5, "b": 5.0}),
        (lambda outputs: [outputs.mean(), 2 * outputs.mean()], {"total": 7.5, "loss0": 2.5, "loss1": 5.0}),
    ],
)
def test_weighted_microbatches(loss, expected):
    """Losses and gradients are sums over microbatches with their weights, and the batch is complete again."""
    state, step, _ = make(loss, split=lambda: [(batch_of(1.0), 0.75), (batch_of(7.0), 0.25)])
    state.batch = complete = batch_of(1.0, 1.0, 1.0, 7.0)

    total = step.compute_gradients()

    assert step.losses == expected
    assert total == state.total_loss == expected["total"]
    assert state.model.weight.grad == expected["total"]
    assert state.batch is complete


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_mean_over_nothing_has_no_weight(kind):
    """A microbatch of weight 0, whose loss is NaN, changes neither the losses nor the gradients."""
    parts = [(batch_of(1.0), kind(1.0)), (batch_of(-1.0), kind(0.0))]
    state, step, _ = make(lambda outputs: outputs[outputs > 0].mean(), split=lambda: parts)
    state.batch = batch_of(1.0, -1.0)

    assert step.compute_gradients() == 1.0
    assert state.model.weight.grad == 1.0


def test_last_graph_is_freed_before_the_next_one():
    """When a microbatch begins, the outputs and the loss of the one before are freed; the last ones remain."""
    held = []
    state, step, _ = make(split=lambda: [(batch_of(1.0), 0.5)] * 2)
    step.forward = lambda batch: held.append((state.outputs, state.loss)) or state.model(batch)

    step.compute_gradients()

    assert held == [(None, None)] * 2
    assert None not in (state.outputs, state.loss)


def test_a_batch_that_is_computed_twice():
    """SAM's second computation repeats all draws; the first losses are logged, and the last total is returned."""
    state, step, seen = make(optimizer=lambda parameters, lr: SAMOptimizer(torch.optim.SGD(parameters, lr), rho=0.5))
    draws, totals = [], []

    def forward(batch):
        draws.append((torch.rand(1).item(), torch.rand(1, generator=state.generator("mine")).item()))
        return state.model(batch)

    def closure():
        totals.append(step.compute_gradients())
        return totals[-1]

    step.forward = forward
    step.begin_batch(batch_of(1.0))
    state.optimizers[0].step(closure)

    assert draws[0] == draws[1]
    assert totals[0] < totals[1]
    assert step.losses["total"] == state.total_loss == totals[0]
    assert seen.count(("before_train_batch", -1)) == 2


def test_gradients_are_completed_before_the_last_event():
    """`complete` is called once, after the last backward pass and before algorithms change the gradients."""
    _, step, seen = make(split=lambda: [(batch_of(1.0), 0.5)] * 2)
    step.complete = lambda: (seen.append("complete"), step.scale_losses(4.0))

    assert step.compute_gradients() == step.losses["total"] == 4.0
    assert seen[-3:] == [("after_backward", 1), "complete", ("after_train_batch", 1)]


@pytest.mark.parametrize(("fails", "called"), [("forward", "Linear"), ("loss", "Linear.loss")])
def test_errors_of_the_model(fails, called):
    """An error of the model has a note with the call, the event before it and the batch."""
    state, step, _ = make()
    setattr(step, fails, lambda *_: 1 / 0)
    state.batch = batch_of(1.0)

    with pytest.raises(ZeroDivisionError) as error:
        step.compute_gradients()

    assert error.value.__notes__ == [
        f"{called} was called after the event 'before_{fails}', with the batch float32[1, 1]."
    ]


@pytest.mark.parametrize(
    ("loss", "error", "sentence"),
    [
        (lambda outputs: outputs, ValueError, "The loss of Linear must be one number, got a tensor of the shape"),
        (lambda outputs: outputs.mean().detach(), ValueError, "The loss of Linear does not depend on any weight"),
        (lambda outputs: "0.1", TypeError, "The model's loss must be a tensor, or a dictionary or sequence"),
    ],
)
def test_invalid_losses(loss, error, sentence):
    """A loss without a gradient raises an error that describes what it has to be."""
    state, step, _ = make(loss)
    state.batch = batch_of(1.0, 2.0)

    with pytest.raises(error, match=sentence):
        step.compute_gradients()


def caused_by(cause):
    """Return an error with a cause."""
    error = ValueError("step failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("no room"), True),
        (RuntimeError("MPS backend out of memory"), True),
        (RuntimeError("cuBLAS error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (caused_by(torch.OutOfMemoryError("no room")), True),
        (RuntimeError("shapes do not fit"), False),
        (MemoryError("out of memory"), False),
        (None, False),
    ],
)
def test_out_of_memory_errors(error, expected):
    """Errors of the device's allocator and of libraries that could not allocate are recognized, also as causes."""
    assert is_out_of_memory(error) is expected


class TestSplitStep:
    """A function of a complete step is split at the call of the module."""

    def test_module_that_is_not_called(self):
        """The error names the module, whose forward function is restored."""
        module = nn.Linear(48, 3)
        split = SplitStep(lambda batch: batch[0].sum(), module)
        with pytest.raises(RuntimeError, match="did not call Linear"):
            split.forward((torch.zeros(4, 48), None))
        assert "forward" not in vars(module)

    def test_own_forward_of_the_instance(self):
        """A forward function that was set on the module itself is restored, also after an error in it."""
        module = nn.Linear(2, 2)

        def own(inputs):
            raise ValueError("own")

        module.forward = own
        split = SplitStep(lambda batch: module(batch).sum(), module)
        with pytest.raises(ValueError, match="own"):
            split.forward(torch.ones(1, 2))
        assert module.forward is own

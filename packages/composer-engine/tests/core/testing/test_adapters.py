"""The contract of adapters accepts a correct host, and describes the violation of each broken one."""

import pytest

from composer.core import Adapter, Event, served_fields
from composer.core.testing import check_adapter

SERVES = served_fields("Host")


class Host:
    """A host that fulfils the contract, except for a fault."""

    def __init__(self, fault=None, serves=SERVES):
        self.fault, self.serves = fault, serves

    def has(self, fault):
        return self.fault == fault

    def __call__(self, run):
        model, optimizer = run.model, run.make_optimizer()
        served = SERVES if self.has("serves all") else self.serves
        adapter = Adapter(served, model, run.algorithms, forward=lambda batch: model(batch[0]), loss=run.loss)
        adapter.prepare(optimizer)
        if run.checkpoint:
            model.load_state_dict(run.checkpoint["model"])
            if not self.has("optimizer without state"):
                optimizer.load_state_dict(run.checkpoint["optimizer"])
            if not self.has("state not loaded"):
                adapter.load_state_dict(run.checkpoint["algorithms"])
        adapter.begin_fit(max_duration=f"{run.epochs}ep", train_dataloader=run.data)
        for _ in range(1 if run.checkpoint else 0, run.epochs):
            if not self.has("late epoch"):
                adapter.begin_epoch()
            for batch in run.data:
                self.step(run, adapter, optimizer, batch)
                if self.has("late epoch"):
                    adapter.begin_epoch()
            adapter.end_epoch()
            self.evaluate(run, adapter)
        adapter.end_fit()
        states = {"model": model, "optimizer": optimizer, "algorithms": adapter}
        return adapter, {name: one.state_dict() for name, one in states.items()}

    def step(self, run, adapter, optimizer, batch):
        changed = adapter.begin_batch(batch)
        if self.has("own batch"):
            changed = batch

        def closure():
            optimizer.zero_grad()
            loss = adapter.compute_loss(changed)
            if self.has("own loss"):
                loss = run.loss(run.model(changed[0]), changed)
            loss.backward()
            adapter.end_backward()
            if not self.has("late end of the gradients"):
                adapter.end_gradients()
            return loss.detach()

        if self.has("own optimizer"):
            closure()
            optimizer.step()
        else:
            adapter.optimizers[0].step(closure)
        if self.has("late end of the gradients"):
            adapter.end_gradients()
        if not self.has("no clock"):
            adapter.end_step()

    def evaluate(self, run, adapter):
        if self.has("own weights"):
            run.evaluate()
        elif self.has("not restored"):
            self.context = adapter.evaluation()  # kept, as a context without references is closed
            self.context.__enter__()
            run.evaluate()
            self.context.__exit__(None, None, None)
        elif not self.has("no evaluation"):
            with adapter.evaluation():
                run.evaluate()


def test_a_correct_host():
    """A host that calls all methods in their places fulfils the contract."""
    check_adapter(Host(), SERVES)


@pytest.mark.parametrize(
    "missing",
    [
        {"not_writable": {"optimizers"}},
        {"not_readable": {"outputs"}},
        {"not_run": {Event.BEFORE_LOSS, Event.AFTER_LOSS}},
        {"not_writable": {"batch", "loss"}, "not_run": {Event.BEFORE_BACKWARD}},
    ],
)
def test_a_host_that_serves_less(missing):
    """A host that refuses what it does not serve fulfils the contract."""
    serves = served_fields("Host", **missing)
    check_adapter(Host(serves=serves), serves)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            "late epoch",
            "Host runs 'after_dataloader' at epoch 0, batch 0 and sample 0 where the loop runs 'epoch_start'",
        ),
        ("no clock", "Host runs 'after_dataloader' at .* where the loop runs 'batch_end' at epoch 0, batch 1"),
        ("own batch", "differently from the loop with an algorithm that adds noise from its generator to the inputs"),
        ("own loss", "differently from the loop with an algorithm that halves the inputs before the forward pass"),
        ("late end of the gradients", "with an algorithm that halves the gradients"),
        ("own optimizer", "with an algorithm that replaces the optimizer"),
        ("own weights", "Host evaluates other weights than the averages"),
        ("no evaluation", "Host called `evaluate` 0 times in one epoch"),
        ("not restored", "Host does not restore the training weights after an error in the evaluation"),
        ("state not loaded", "Host resumes differently from a run without a stop|After a resume"),
        ("optimizer without state", "Host resumes differently from a run without a stop"),
    ],
)
@pytest.mark.filterwarnings("ignore:SAMOptimizer is in state.optimizers and has not stepped")
def test_a_broken_host(fault, sentence):
    """Each fault is found by its check."""
    with pytest.raises(AssertionError, match=sentence):
        check_adapter(Host(fault), SERVES)


def test_a_host_that_refuses_nothing():
    """A host that passes other fields to the adapter than it declares is found by its refusals."""
    with pytest.raises(
        AssertionError, match=r"with an algorithm that writes 'optimizers' at .*, which it does not serve"
    ):
        check_adapter(Host("serves all"), served_fields("Host", not_writable={"optimizers"}))


def test_errors_of_the_host():
    """An error of the host itself is let through."""

    def train(run):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        check_adapter(train, SERVES)

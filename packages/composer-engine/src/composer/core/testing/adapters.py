"""The contract of adapters: a host with an adapter trains as the loop of the contract suite does."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from composer import functional as cf
from composer.core.base import Algorithm
from composer.core.declarations import ALWAYS_SERVED, FIELDS, OPTIONAL_EVENTS, ServedFields
from composer.core.event import Event, Stage
from composer.core.planning import build_plan, check_served
from composer.core.serializable import saved
from composer.core.serialization import equal
from composer.core.state import State
from composer.core.testing.loop import Training, seeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from composer.core.adapter import Adapter
    from composer.core.logger import Logger

__all__ = ["ADAPTER_CHECKS", "HostRun", "check_adapter"]

_BATCHES = 3


@attrs.frozen
class HostRun:
    """What a host has to train in a check.

    Args:
        model: A small module: ``model(inputs)`` for ``inputs`` ``(N, 4)`` returns scores ``(N, 3)``.
        algorithms: The algorithms.
        epochs: The number of epochs at the end of the training.
        data: The batches of an epoch, pairs of inputs and class ids.
        evaluate: The host calls it once after each epoch, as its evaluation of the model.
        checkpoint: What an earlier run returned, to resume from; None at the beginning.
    """

    model: nn.Module
    algorithms: Sequence[Algorithm]
    epochs: int
    data: Sequence[tuple[Tensor, Tensor]]
    evaluate: Callable[[], None]
    checkpoint: Any = None

    def make_optimizer(self) -> Optimizer:
        """Return a new optimizer of the model's parameters."""
        return SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    @staticmethod
    def loss(outputs: Tensor, batch: tuple[Tensor, Tensor], reduction: str = "mean") -> Tensor:
        """Return the loss of the model's outputs for a batch."""
        return cross_entropy(outputs, batch[1], reduction=reduction)


def check_adapter(train: Callable[[HostRun], tuple[Adapter, Any]], serves: ServedFields) -> None:
    """Check that a host with an adapter fulfils the contract.

    It computes the same weights as the loop of the contract suite, :class:`Training`, bit for bit, with each algorithm
    that it serves, and refuses the others before it trains. Events have the same order and the clock counts the same.
    Evaluation sees the averaged weights, and the training weights are restored at its end, also after an error. A run
    that is resumed from the host's checkpoint continues with the same bits.

    Args:
        train: Trains by the host until the end of ``run.epochs``, with the default seed and in float32, and returns the
            adapter and the host's checkpoint. It lets errors through.
        serves: What the adapter declares to serve.

    Raises:
        AssertionError: A check failed; the message describes the violation.

    Example:
        >>> from composer.core import Adapter, served_fields
        >>> serves = served_fields("MyLoop", not_writable={"optimizers"})
        >>> def train(run):
        ...     model, optimizer = run.model, run.make_optimizer()
        ...     adapter = Adapter(
        ...         serves, model, run.algorithms, forward=lambda batch: model(batch[0]), loss=run.loss
        ...     )
        ...     adapter.prepare(optimizer)
        ...     if run.checkpoint:
        ...         model.load_state_dict(run.checkpoint["model"])
        ...         optimizer.load_state_dict(run.checkpoint["optimizer"])
        ...         adapter.load_state_dict(run.checkpoint["algorithms"])
        ...     adapter.begin_fit(max_duration=f"{run.epochs}ep", train_dataloader=run.data)
        ...     while adapter.state.timestamp.epoch < run.epochs:
        ...         adapter.begin_epoch()
        ...         for batch in run.data:
        ...             optimizer.zero_grad()
        ...             adapter.compute_loss(adapter.begin_batch(batch)).backward()
        ...             adapter.end_backward()
        ...             adapter.end_gradients()
        ...             optimizer.step()
        ...             adapter.end_step()
        ...         adapter.end_epoch()
        ...         with adapter.evaluation():
        ...             run.evaluate()
        ...     adapter.end_fit()
        ...     states = {"model": model, "optimizer": optimizer, "algorithms": adapter}
        ...     return adapter, {name: one.state_dict() for name, one in states.items()}
        >>> check_adapter(train, serves)
    """
    for check in ADAPTER_CHECKS:
        check(_Host(train, serves))


class _Net(nn.Module):
    """Two linear layers with a ReLU, which surgery replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


@attrs.frozen
class _Host:
    """A host, and the loop that it is compared with."""

    _train: Callable[[HostRun], tuple[Adapter, Any]]
    serves: ServedFields

    @property
    def name(self) -> str:
        return self.serves.host

    def run(
        self,
        *algorithms: Algorithm,
        epochs: int = 2,
        evaluate: Callable[[], None] | None = None,
        checkpoint: Any = None,
        model: nn.Module | None = None,
    ) -> tuple[nn.Module, Adapter, Any]:
        """Train by the host; return the model, the adapter and the checkpoint."""
        model = _new(_Net) if model is None else model
        run = HostRun(model, algorithms, epochs, _new(_make_data), evaluate or (lambda: None), checkpoint)
        with seeded("host"):
            return model, *self._train(run)

    def serves_algorithm(self, algorithm: Algorithm) -> bool:
        """Return whether the host declares to serve an algorithm."""
        try:
            check_served(self.serves, build_plan([algorithm]).entries)
        except ValueError:
            return False
        return True


class _Own(nn.Module):
    """The model as the loop of the contract suite calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        return self.model(batch[0])

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor], reduction: str = "mean") -> Tensor:
        return HostRun.loss(outputs, batch, reduction)


def _train_own(*algorithms: Algorithm, epochs: int = 2) -> nn.Module:
    """Train by the loop of the contract suite, and return the model."""
    model: nn.Module = _new(_Net)
    optimizers: Any = SGD(model.parameters(), lr=0.1, momentum=0.9)
    duration: Any = f"{epochs}ep"
    state = State(_Own(model), optimizers=optimizers, max_duration=duration, train_dataloader=_new(_make_data))
    Training(state, algorithms).run(epochs * _BATCHES)
    return model


def _new(make: Callable[[], Any]) -> Any:
    """Return a new object with the same random numbers each time."""
    with seeded(make.__name__):
        return make()


def _make_data() -> list[tuple[Tensor, Tensor]]:
    return [(torch.rand(6, 4), torch.randint(3, (6,))) for _ in range(_BATCHES)]


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def _check_weights(model: nn.Module, expected: dict[str, Tensor], violation: str) -> None:
    weights = model.state_dict()
    assert weights.keys() == expected.keys(), (
        f"{violation}: the model has the weights {[*weights]} instead of {[*expected]}."
    )
    different = [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)]
    assert not different, f"{violation}: {len(different)} of {len(weights)} weights differ, such as {different[0]!r}."


class _Events(Algorithm):
    """Records the events with the clock."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int, int]] = []

    def match(self, event: Event, state: State) -> bool:
        return event not in OPTIONAL_EVENTS

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        clock = state.timestamp
        self.seen.append((event.value, int(clock.epoch), int(clock.batch), int(clock.sample)))


class _Surgery(Algorithm):
    """Replaces the ReLU by a layer with a parameter."""

    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    reads: ClassVar = {"model", "optimizers"}
    writes: ClassVar = reads

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        cf.replace_module_classes(state.model, {nn.ReLU: lambda *_: nn.PReLU()}, state.optimizers)


class _Noise(Algorithm):
    """Adds noise from its generator to the inputs."""

    runs_at: ClassVar = {Event.AFTER_DATALOADER: Stage.AUGMENT}
    reads: ClassVar = {"batch.input"}
    writes: ClassVar = reads

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        inputs = state.batch_get_item(0)
        noise = torch.rand(inputs.shape, generator=state.generator(self))
        state.batch_set_item(0, inputs + noise.to(inputs.device))


class _Scaling(Algorithm):
    """Halves the inputs before the forward pass."""

    runs_at: ClassVar = {Event.BEFORE_FORWARD: Stage.AUGMENT}
    reads: ClassVar = {"batch.input"}
    writes: ClassVar = reads

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.batch_set_item(0, state.batch_get_item(0) / 2)


class _Relabeling(Algorithm):
    """Replaces the targets by the predictions for the first samples."""

    runs_at: ClassVar = {Event.BEFORE_LOSS: Stage.LABEL}
    reads: ClassVar = {"batch.target", "outputs"}
    writes: ClassVar = {"batch.target"}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        targets = state.batch_get_item(1).clone()
        targets[:2] = state.outputs.argmax(1)[:2]
        state.batch_set_item(1, targets)


class _Temperature(Algorithm):
    """Halves the outputs."""

    runs_at: ClassVar = {Event.AFTER_FORWARD: Stage.LOSS}
    reads: ClassVar = {"outputs"}
    writes: ClassVar = reads

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.outputs = state.outputs / 2


class _LossWeight(Algorithm):
    """Doubles the loss."""

    runs_at: ClassVar = {Event.AFTER_LOSS: Stage.LOSS}
    reads: ClassVar = {"loss"}
    writes: ClassVar = reads

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.loss = state.loss * 2


class _Damping(Algorithm):
    """Halves the gradients."""

    runs_at: ClassVar = {Event.AFTER_TRAIN_BATCH: Stage.GRADIENT}
    reads: ClassVar = {"model"}
    writes: ClassVar = {"gradients"}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        for parameter in state.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class _TwoPasses(Algorithm):
    """Replaces the optimizer by one that computes the gradients of a batch twice, by a closure."""

    runs_at: ClassVar = {Event.AFTER_LOAD: Stage.GRADIENT}
    reads: ClassVar = {"optimizers"}
    writes: ClassVar = {"optimizers"}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.optimizers = [cf.SAMOptimizer(optimizer) for optimizer in state.optimizers]


@attrs.define(eq=False)
class _Averaging(Algorithm):
    """Averages the last two weights for evaluation."""

    averages: dict[str, Tensor] = saved(factory=dict)

    runs_at: ClassVar = {Event.BATCH_END: Stage.WEIGHTS}
    reads: ClassVar = {"model"}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        for name, weight in state.model.state_dict().items():
            self.averages[name] = (weight + self.averages.get(name, weight)) / 2

    def evaluation_weights(self, state: State) -> AbstractContextManager[object]:
        return self._exchanged(state.model)

    @contextlib.contextmanager
    def _exchanged(self, model: nn.Module) -> Iterator[None]:
        before = _weights(model)
        model.load_state_dict(self.averages)
        try:
            yield
        finally:
            model.load_state_dict(before)


_PROBES: list[Any] = [
    _Surgery,
    _Noise,
    _Scaling,
    _Temperature,
    _Relabeling,
    _LossWeight,
    _Damping,
    _TwoPasses,
    _Averaging,
]


def _check_events(host: _Host) -> None:
    """The events come in the order of the contract suite's loop, with the same clock."""
    seen, expected = _Events(), _Events()
    host.run(seen)
    _train_own(expected)
    declared = {event.value for event in {*host.serves.readable, *host.serves.writable}}
    declared.discard(Event.FIT_END.value)  # after the last epoch, which the loop of the suite leaves open
    got, wanted = ([moment for moment in one.seen if moment[0] in declared] for one in (seen, expected))
    for place, (one, other) in enumerate(zip(got, wanted, strict=False)):
        assert one == other, (
            f"{host.name} runs {_moment(one)} where the loop runs {_moment(other)}, "
            f"after {_moment(got[place - 1]) if place else 'the start'}."
        )
    assert len(got) == len(wanted), f"{host.name} runs {len(got)} events instead of {len(wanted)}."


def _moment(moment: tuple[str, int, int, int]) -> str:
    event, epoch, batch, sample = moment
    return f"{event!r} at epoch {epoch}, batch {batch} and sample {sample}"


def _check_probes(host: _Host) -> None:
    """With each algorithm that the host serves, the weights are those of the contract suite's loop."""
    for probes in [[], *([probe] for probe in _PROBES)]:
        if all(host.serves_algorithm(probe()) for probe in probes):
            model, adapter, _ = host.run(*(probe() for probe in probes))
            expected = _train_own(*(probe() for probe in probes)).state_dict()
            label = f"an algorithm that {_act(probes[0])}" if probes else "no algorithm"
            _check_weights(model, expected, f"{host.name} trains differently from the loop with {label}")
            steps = int(adapter.state.timestamp.batch)
            assert steps == 2 * _BATCHES, f"The clock of {host.name} counts {steps} of {2 * _BATCHES} steps."


def _act(probe: type[Algorithm]) -> str:
    text = (probe.__doc__ or "").rstrip(".")
    return text[0].lower() + text[1:]


def _check_evaluation(host: _Host) -> None:
    """Evaluation sees the averages, and the training weights are restored, also after an error."""
    for fails in (False, True):
        model, averaging = _new(_Net), _Averaging()
        seen: list[dict[str, Tensor]] = []

        def evaluate(model: nn.Module = model, seen: list[dict[str, Tensor]] = seen, fails: bool = fails) -> None:
            seen.append(_weights(model))
            if fails:
                raise _EvaluationError

        with contextlib.suppress(_EvaluationError):
            host.run(averaging, epochs=1, evaluate=evaluate, model=model)
        assert len(seen) == 1, f"{host.name} called `evaluate` {len(seen)} times in one epoch, expected once."
        assert equal(seen[0], averaging.averages), (
            f"{host.name} evaluates other weights than the averages: evaluate in `with adapter.evaluation():`."
        )
        when = "after an error in the evaluation" if fails else "after the evaluation"
        expected = _train_own(epochs=1).state_dict()
        _check_weights(model, expected, f"{host.name} does not restore the training weights {when}")


class _EvaluationError(Exception):
    """Raised in an evaluation by a check."""


def _check_resume(host: _Host) -> None:
    """A run that is resumed from the host's checkpoint gets the weights, averages and clock of one without a stop."""
    probes = [probe for probe in (_Surgery, _Noise, _Averaging) if host.serves_algorithm(probe())]
    averagings = [[probe() for probe in probes] for _ in range(3)]
    model, adapter, _ = host.run(*averagings[0])
    _, stopped, checkpoint = host.run(*averagings[1], epochs=1)
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)
    file.seek(0)
    assert equal(torch.load(file, weights_only=True), stopped.state_dict()), (
        f"The state of {host.name}'s adapter changes when it is saved and loaded."
    )
    resumed, again, _ = host.run(*averagings[2], checkpoint=copy.deepcopy(checkpoint))
    expected = model.state_dict()
    _check_weights(resumed, expected, f"{host.name} resumes differently from a run without a stop")
    clocks = again.state.timestamp.batch, adapter.state.timestamp.batch
    assert clocks[0] == clocks[1], (
        f"After a resume the clock of {host.name} is at {clocks[0]} instead of {clocks[1]}: "
        "save and load the adapter's state_dict()."
    )
    for one, other in zip(averagings[2], averagings[0], strict=True):
        assert equal(one.state_dict(), other.state_dict()), (
            f"After a resume in {host.name} the state of an algorithm that {_act(type(one))} differs."
        )


def _check_refusals(host: _Host) -> None:
    """Each algorithm that needs more than the host serves is refused before the training."""
    served = {*host.serves.readable, *host.serves.writable}
    missing = [("run", event, "") for event in Event if event not in {*served, *OPTIONAL_EVENTS}]
    for verb, by_event in (("reads", host.serves.readable), ("writes", host.serves.writable)):
        for field in sorted(FIELDS - ALWAYS_SERVED):
            places = [event for event in served - OPTIONAL_EVENTS if field not in by_event.get(event, frozenset())]
            missing += [(verb, event, field) for event in sorted(places)[:1]]
    for verb, event, field in missing:
        declared = {"runs_at": {event: Stage.AUGMENT}, "apply": _do_nothing, verb: frozenset({field} - {""})}
        model = _new(_Net)
        before = _weights(model)
        refused = False
        try:
            host.run(type("Refused", (Algorithm,), declared)(), model=model)
        except ValueError:
            refused = True
        what = f"{verb} {field!r} at {event.value!r}" if field else f"runs at {event.value!r}"
        assert refused, f"{host.name} trains with an algorithm that {what}, which it does not serve: pass `serves`."
        _check_weights(model, before, f"{host.name} changed the model before it refused an algorithm that {what}")


def _do_nothing(self: Algorithm, event: Event, state: State, logger: Logger) -> None:
    """Change nothing."""


ADAPTER_CHECKS = (_check_events, _check_probes, _check_evaluation, _check_resume, _check_refusals)
"""The checks of :func:`check_adapter`, in their order."""

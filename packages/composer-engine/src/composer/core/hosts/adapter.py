"""Runs algorithms in the training loop of another library, which calls an adapter at each part of a step."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer.core.data.batches import count_samples, count_tokens, describe_batch
from composer.core.data.packing import check_packed_model, has_packed_rows
from composer.core.declarations import FIELDS, ServedFields
from composer.core.engine import Engine
from composer.core.evaluator import evaluation_weights, frozen_norms
from composer.core.event import Event
from composer.core.logger import Logger, LoggerDestination
from composer.core.precision import Precision
from composer.core.saving import saved_state
from composer.core.saving.codec import to_data
from composer.core.state import State
from composer.core.step import Step, total_of
from composer.core.time import TimeUnit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.optim import Optimizer

    from composer.core.base import Algorithm
    from composer.core.data.batches import Batch
    from composer.core.plan import Plan
    from composer.core.saving.saved_state import LoadReport
    from composer.core.time import Time

# An adapter has no hook before a batch is loaded, and none in the batches of the host's evaluations.
_NOT_RUN = frozenset(event for event in Event if event.startswith("predict_")) | {
    Event.BEFORE_DATALOADER,
    Event.EVAL_BATCH_START,
    Event.EVAL_BEFORE_FORWARD,
    Event.EVAL_AFTER_FORWARD,
    Event.EVAL_BATCH_END,
}
# A host keeps its model object: algorithms change it in place. NoOpModel, the one that replaces it, reads "algorithms".
_NOT_READABLE = frozenset(
    {"algorithms", "callbacks", "eval_metrics", "evaluators", "scaler", "schedulers", "train_metrics"}
)
# The host iterates over its loader and counts the steps itself.
_NOT_WRITABLE = _NOT_READABLE | {"dataloader", "dataloader_len", "max_duration", "timestamp"}
# What an algorithm reads between the forward pass and the loss, or changes there.
_NEEDED = dict.fromkeys(
    (Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS), frozenset({"outputs", "batch.target"})
)


def served_fields(
    host: str,
    *,
    not_run: Iterable[Event] = (),
    not_readable: Iterable[str] = (),
    not_writable: Iterable[str] = (),
    not_writable_at: Mapping[Event, Iterable[str]] | None = None,
) -> ServedFields:
    """Return what a host serves that calls all methods of an :class:`Adapter`, except for what is given here.

    Args:
        host: The name of the host, for errors.
        not_run: Events that the host does not run.
        not_readable: Fields without a current value, such as ``"outputs"`` in a host that computes outputs and loss in
            one call, or ``"losses"`` if the loss cannot be computed with ``reduction="none"``.
        not_writable: Fields whose new values the host does not use, such as ``"train_dataloader"``.
        not_writable_at: Such fields for single events.

    Example:
        >>> served = served_fields("MyLoop", not_writable={"optimizers"})
        >>> "optimizers" in served.readable[Event.AFTER_LOAD], "optimizers" in served.writable[Event.AFTER_LOAD]
        (True, False)
    """
    events = [event for event in Event if event not in {*_NOT_RUN, *not_run}]
    readable = FIELDS - _NOT_READABLE - {*not_readable}
    writable = FIELDS - _NOT_WRITABLE - {*not_readable, *not_writable}
    at_events = {event: writable - {*(not_writable_at or {}).get(event, ())} for event in events}
    return ServedFields(host, dict.fromkeys(events, readable), at_events)


class _HostLog(LoggerDestination):
    """Passes metrics to the logger of the host."""

    def __init__(self, log: Callable[[Mapping[str, Any], int | None], object]) -> None:
        self._log = log

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._log(metrics, step)


class Adapter:
    """Algorithms in a training loop that belongs to a host.

    The host calls the methods in this order. Each runs the events that are due there, and keeps the state and its clock
    up to date; everything else, such as data, backward passes and steps of the optimizers, remains with the host::

        adapter.prepare()                           # surgery: before weights are loaded
        adapter.begin_fit(optimizers, max_duration="2ep")
        optimizers = adapter.optimizers             # algorithms may have replaced them
        for each epoch:
            adapter.begin_epoch()
            for each batch:
                batch = adapter.begin_batch(batch)
                loss = adapter.compute_loss(batch)  # forward pass and loss
                loss.backward()
                adapter.end_backward()
                if the gradients of a step are complete:
                    adapter.end_gradients()         # gradients are unscaled and averaged
                    step of each optimizer
                    adapter.end_step()
            adapter.end_epoch()
        adapter.end_fit()

    A batch of the clock is a step of the optimizers. Under gradient accumulation the batches of the loader are its
    microbatches. An optimizer that takes a closure (SAM's) may call :meth:`compute_loss` to :meth:`end_gradients` again
    with the same batch: random draws are repeated. The host puts the model into training mode; ``compute_loss`` leaves
    the frozen norms of the beginning in evaluation mode.

    Args:
        serves: The name of the host, and what it serves; see :func:`served_fields`.
        model: The model to train; algorithms replace its layers and average its weights.
        algorithms: One or several.
        forward: ``f(batch) -> outputs``; calls the model with the batch if None.
        loss: ``f(outputs, batch) -> loss``; ``model.loss`` if None.
        seed: The seed of the run, the same in each process.
        precision: The precision in which the host computes.
        device: The device of the batches.
        log: ``f(metrics, step)``, called with what algorithms log; it is dropped if None.
        world_size: The number of processes that train on different samples.

    Attributes:
        state: The state of the training.
        engine: Runs the algorithms.
        world_size: The number of processes, for hosts that start them later.
        serves: What the host serves.
        is_prepared: Whether :meth:`prepare` has run.

    Raises:
        AlgorithmConflictError: Two of the algorithms cannot work together.
        ValueError: An algorithm needs an event or a field that the host does not serve.

    Example:
        >>> import torch
        >>> from composer.algorithms import LabelSmoothing
        >>> model = torch.nn.Linear(4, 3)
        >>> def loss(outputs, batch):
        ...     return torch.nn.functional.cross_entropy(outputs, batch[1])
        >>> adapter = Adapter(
        ...     served_fields("MyLoop"), model, LabelSmoothing(0.1), forward=lambda batch: model(batch[0]), loss=loss
        ... )
        >>> adapter.prepare()
        >>> adapter.begin_fit(torch.optim.SGD(model.parameters(), lr=0.1), max_duration="1ba")
        >>> batch = adapter.begin_batch((torch.rand(8, 4), torch.randint(3, (8,))))
        >>> adapter.compute_loss(batch).backward()
        >>> adapter.end_backward()
        >>> adapter.end_gradients()
        >>> adapter.optimizers[0].step()
        >>> adapter.end_step()
        >>> adapter.state.timestamp.batch, adapter.state.timestamp.sample
        (Time(1, TimeUnit.BATCH), Time(8, TimeUnit.SAMPLE))
    """

    def __init__(
        self,
        serves: ServedFields,
        model: Any,
        algorithms: Algorithm | Iterable[Algorithm],
        *,
        forward: Callable[[Batch], Any] | None = None,
        loss: Callable[..., Any] | None = None,
        seed: int = 0,
        precision: Precision | str = "fp32",
        device: torch.device | str = "cpu",
        log: Callable[[Mapping[str, Any], int | None], object] | None = None,
        world_size: int = 1,
    ) -> None:
        self.state = State(
            model,
            seed,
            device=torch.device(device),
            precision=Precision(precision),
            forward=forward,
            loss_function=loss,
        )
        logger = Logger(self.state, [] if log is None else [_HostLog(log)])
        self.engine = Engine(self.state, logger, algorithms=algorithms, serves=serves)
        self.world_size = world_size
        self.is_prepared, self._frozen_norms = False, set[nn.Module]()
        self.serves = serves
        self._checks_packing = False
        self._loss: Any = None
        self._warned = False
        self._begin_step()

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers that the host has to step."""
        return self.state.optimizers

    @property
    def needs_outputs(self) -> list[str]:
        """The algorithms that need the outputs, so that the forward pass and the loss must be separate calls."""
        return [
            entry.key
            for event, entries in self.explain().entries.items()
            for entry in entries
            if entry.kind == "algorithm"
            and ({"losses"} | _NEEDED.get(event, frozenset())) & {*entry.reads, *entry.writes}
        ]

    @property
    def is_in_epoch(self) -> bool:
        """Whether an epoch has begun, perhaps before a resume, and has not ended."""
        return self._has_begun_epoch or self.state.timestamp.count(TimeUnit.BATCH, in_epoch=True) > 0

    @property
    def is_in_step(self) -> bool:
        """Whether a batch has begun since the last step of the optimizers."""
        return self._batch is not None

    @property
    def computes_again(self) -> bool:
        """Whether an optimizer computes the loss of a step several times, with a closure; known after ``begin_fit``."""
        return self._step.computes_again

    def writers(self, field: str, event: Event) -> list[str]:
        """Return the keys of the algorithms that write a field at an event."""
        return [entry.key for entry in self.explain().entries.get(event, ()) if field in entry.writes]

    def prepare(
        self,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
        *,
        max_duration: Time | str | int | None = None,
        train_dataloader: Iterable[Batch] | None = None,
        dataloader_len: int | None = None,
    ) -> None:
        """Let algorithms change the model, once; call it before weights are loaded.

        Args:
            optimizers: Optimizers that exist already; their parameters and state follow the replaced layers.
            max_duration: As in :meth:`begin_fit`, if known already. GyroDropout, whose layers depend on the length of
                the training, then replaces them here; otherwise when the training begins, after weights are loaded.
            train_dataloader: As in :meth:`begin_fit`, if known already.
            dataloader_len: As in :meth:`begin_fit`, if known already.

        Raises:
            ValueError: An algorithm has replaced the model object, which the host trains.
        """
        state = self.state
        if optimizers is not None:
            state.optimizers = optimizers
        if max_duration is not None:
            state.max_duration = max_duration
        if train_dataloader is not None:
            state.train_dataloader = train_dataloader
        if train_dataloader is not None or dataloader_len is not None or state.dataloader_label is None:
            state.set_dataloader(state.train_dataloader, "train", -1 if dataloader_len is None else dataloader_len)
        if not self.is_prepared:
            self.is_prepared, model = True, state.model
            self.engine.run_event(Event.INIT)
            if state.model is not model:
                raise ValueError(
                    f"algorithms must keep the model object, which {self.serves.host} trains: replace its layers "
                    "instead."
                )
            self._frozen_norms = {*frozen_norms(model)}

    def begin_fit(
        self,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
        *,
        max_duration: Time | str | int | None = None,
        train_dataloader: Iterable[Batch] | None = None,
        dataloader_len: int | None = None,
    ) -> None:
        """Begin the training, after weights and :meth:`load_state_dict`, if any.

        Args:
            optimizers: The optimizers, if :meth:`prepare` was not given them. Step :attr:`optimizers` from now on.
            max_duration: The duration of the training, such as ``"10ep"`` or ``"500ba"``.
            train_dataloader: The training data.
            dataloader_len: Steps of the optimizers in an epoch; the length of the loader if None.
        """
        self.prepare(
            optimizers, max_duration=max_duration, train_dataloader=train_dataloader, dataloader_len=dataloader_len
        )
        # The host has loaded its weights by now; algorithms that follow the loading still need its events.
        for event in (Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START):
            self.engine.run_event(event)
        self._frozen_norms = {*self._frozen_norms, *frozen_norms(self.state.model)}
        self._begin_step()
        # A module of another kind is called by the host in its own way.
        self._checks_packing = has_packed_rows(self.state.train_dataloader) and (
            "input_ids" in inspect.signature(self.state.model.forward).parameters
        )

    def _begin_step(self) -> None:
        """Begin a step with the optimizers of the training; one that an error has ended or a load replaces is lost."""
        state = self.state
        self._step = Step(state, self.engine.calls, state.compute_outputs, state.compute_loss)
        self._samples = self._tokens = 0
        self._is_backward_due = self._has_begun_epoch = False
        self._batch: Batch = None
        state.microbatch = -1

    def begin_epoch(self) -> None:
        """Begin an epoch; do nothing within one, as after a resume."""
        if not self.is_in_epoch:
            self._has_begun_epoch = True
            self.engine.run_event("iteration_start")
            self.engine.run_event("epoch_start")

    def begin_batch(self, batch: Batch) -> Batch:
        """Return a batch of the loader as algorithms have changed it.

        Args:
            batch: A batch, on the device of the model.
        """
        # As the trainer counts: samples as they are read, tokens as algorithms leave them.
        self._samples += self._count_samples(batch)
        self._batch = self._step.begin_batch(batch)
        if self._checks_packing:
            self._checks_packing = False
            check_packed_model(self.state, self._batch)
        self._tokens += count_tokens(self._batch)
        return self._batch

    def _count_samples(self, batch: Batch) -> int:
        """Return the size of a batch: of a packed one the number of its sequences, 0 if it is unknown."""
        ends = batch.get("cu_seq_lens_q") if isinstance(batch, Mapping) else None
        if isinstance(ends, torch.Tensor):
            return len(ends) - 1
        try:
            return count_samples(batch)
        except ValueError:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"The samples of {describe_batch(batch)} cannot be counted, as its parts have several lengths or "
                    "none. The clock does not count them: use times in batches ('ba'), not in samples ('sp').",
                    stacklevel=2,
                )
            return 0

    def compute_loss(self, batch: Batch) -> Any:
        """Return the loss of a batch or microbatch, before any scaling of it."""
        state = self.state
        for norm in self._frozen_norms:  # the host may call model.train() in each step
            if not any(parameter.requires_grad for parameter in norm.parameters(recurse=False)):
                norm.eval()
        state.batch = batch
        if state.microbatch <= 0:
            self._step.begin_gradients()
            state.microbatch = 0
        loss = self._step.compute_loss()
        total_of(loss)  # raises an error if it is none
        self._is_backward_due = True
        return loss

    def end_backward(self) -> None:
        """Call this after the backward pass of each batch or microbatch; it does nothing if none is due."""
        if self._is_backward_due:
            self._is_backward_due = False
            self.engine.run_event("after_backward")
            self._loss = loss = total_of(self.state.loss).detach()
            if self._step.times_computed == 1:  # later computations of a step are at trial weights
                place, before = self.state.microbatch, self.state.total_loss
                self.state.total_loss = before + (loss - before) / (place + 1) if place > 0 else loss
            # Their graph is freed now, and the next one is not built while they hold its memory.
            self.state.outputs = self.state.loss = None

    def end_gradients(self) -> None:
        """Call this when the gradients of a step are complete, unscaled and averaged over all processes."""
        self.engine.run_event("after_train_batch")

    def closure(self, backward: Callable[[Any], object]) -> Callable[[], Any]:
        """Return a closure for an optimizer that computes a batch several times, in a host that has computed it once.

        Its first call completes the gradients that the host has computed, each further call computes them again.

        Args:
            backward: ``f(loss)``, the backward pass of the host.

        Raises:
            RuntimeError: The host has computed several batches, which cannot be computed again.
        """
        state = self.state
        if state.microbatch > 0:
            raise RuntimeError(
                f"{type(self.optimizers[0]).__name__} computes each batch again, so it cannot accumulate gradients, "
                f"but there were {state.microbatch + 1} batches before optimizer.step(). Step after each batch."
            )
        is_first = True

        def compute_gradients() -> Any:
            nonlocal is_first
            if not is_first:
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                backward(self.compute_loss(self._batch))
                self.end_backward()
            is_first = False
            self.end_gradients()
            return self._loss

        return compute_gradients

    def end_step(self) -> None:
        """Call this after the step of all optimizers; it advances the clock."""
        # Hosts give all processes equally many samples, so nothing is exchanged to count them.
        samples, tokens = self._samples * self.world_size, self._tokens * self.world_size
        self._samples = self._tokens = 0
        self._batch = None
        self._step.end_batch(samples, tokens)

    def end_epoch(self) -> None:
        """Call this after the last step of an epoch; it advances the clock."""
        state, event = self.state, self.engine.run_event
        self._has_begun_epoch = False
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_epoch()
        event("epoch_end")
        event("epoch_checkpoint")
        # Hosts have no iterations of several epochs.
        state.timestamp = state.timestamp.to_next_iteration()
        event("iteration_end")
        event("iteration_checkpoint")

    def end_fit(self) -> None:
        """Call this after the last epoch. Another :meth:`begin_fit` may follow."""
        self.engine.run_event(Event.FIT_END)
        self.state.batch = None

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """A context for evaluations and predictions, in which the model has its averaged weights, if there are any.

        The training weights are restored at the end, also after an error.
        """
        with evaluation_weights(self.state):
            self.engine.run_event("eval_before_all")
            self.engine.run_event("eval_start")
            try:
                yield
            except BaseException:
                self.engine.restore()
                raise
            self.engine.run_event("eval_end")
            self.engine.run_event("eval_after_all")

    def explain(self, *, verbose: bool = False) -> Plan:
        """Return the plan: what runs at which event, in which order and why. Print it for a table.

        Args:
            verbose: Whether the table shows the events of callbacks and loggers, too; else one line names them.
        """
        return self.engine.explain(verbose=verbose)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the algorithms and the clock, as plain data and tensors, for the host's checkpoint.

        Weights and optimizers are saved by the host.
        """
        return to_data(saved_state.state_to_save(self.state))  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> LoadReport:
        """Load what :meth:`state_dict` returned; call it after :meth:`prepare` and before :meth:`begin_fit`.

        Raises:
            StateMismatchError: The state does not fit, and nothing has been loaded.
        """
        report = self.state.load_state_dict(state_dict, self.engine.logger)
        self._begin_step()
        return report

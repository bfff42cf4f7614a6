"""The engine: calls algorithms, callbacks and loggers at the events of a loop, in the order of the plan.

It also warns if the loop does not run the events that algorithms need, or if an algorithm has not acted in a training.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING

import attrs

from composer.core.acts import Acts
from composer.core.base import Algorithm, Callback, NoEffectWarning, call_with_own_draws, overrides
from composer.core.checks import caller_level, nearest
from composer.core.event import MODEL_EVENTS, STEP_EVENTS, Event
from composer.core.interval import Call, checked_interval, only_when_due
from composer.core.logger import Logger, LoggerDestination, Trace, check_state
from composer.core.observable_list import ObservableList
from composer.core.optimizers import Ownership
from composer.core.passes import AlgorithmPass, Passes, all_passes, check_pass
from composer.core.plan import Entry, Plan, Subscription
from composer.core.planning import build_plan, overrides_match
from composer.core.state import STOPPED_BY_SIGNAL, State

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from composer.core.declarations import ServedFields
    from composer.core.time import Time

_DELIVERING = frozenset({Event.FIT_END, Event.EVAL_STANDALONE_END})
"""Where delayed metrics are delivered to the loggers, after the callbacks and before the loggers' own hooks."""

# Before_dataloader also runs where the loader then turns out to have no further batch.
_WITH_A_BATCH = frozenset(STEP_EVENTS) - {Event.BEFORE_DATALOADER}
_IN_EVERY_EPOCH = MODEL_EVENTS | frozenset(STEP_EVENTS)  # or before it; one that is resumed does not start again


class Engine:
    """Runs algorithms, callbacks and loggers at events.

    The plan is made at construction, and again only after algorithms, callbacks, loggers or passes have changed, or
    after :meth:`forget_plan`, which the Trainer calls in each ``fit`` for methods that were set on components. An
    event without listeners costs one look-up in a dictionary. After each algorithm and callback that runs before
    training (``INIT``, ``BEFORE_LOAD``, ``AFTER_LOAD``, ``FIT_START``) the engine checks that the optimizers hold the
    model's parameters. It warns after the first batch of algorithms none of whose layers acted in it, after the first
    epoch of algorithms whose events the loop did not run, and at ``FIT_END`` of algorithms that have not acted. An
    error of a callback or logger at ``FIT_END`` is raised when the others have been called, among them those that save.

    Args:
        state: The state, with the algorithms and callbacks to run in ``state.algorithms`` and ``state.callbacks``.
        logger: The logger for all of them; one without destinations if None.
        algorithm_passes: Passes to apply after the default ones: a function, or ``(function, index)`` to insert it
            among the passes; one or several.
        algorithms: Replaces ``state.algorithms``, if given.
        log_traces: Whether to log for each event which algorithms ran.
        serves: The events that the loop runs and the fields of the state that it serves there; all if None.

    Attributes:
        calls: The calls of each event by its name. The step of a loop makes them itself, as a call of
            ``run_event`` takes more time than an event that nobody listens to. What observes all events of a step
            overrides :meth:`Callback.run_event`.

    Raises:
        AlgorithmConflictError: Two of the algorithms cannot work together.
        TypeError: ``state`` is not a :class:`State`.
        ValueError: An algorithm needs an event or a field that the loop does not serve.

    Example:
        >>> from composer.core import State
        >>> engine = Engine(State(model=None))
        >>> engine.run_event("fit_start")
    """

    def __init__(
        self,
        state: State,
        logger: Logger | None = None,
        algorithm_passes: Passes = None,
        algorithms: Algorithm | Iterable[Algorithm] | None = None,
        *,
        log_traces: bool = False,
        serves: ServedFields | None = None,
    ) -> None:
        check_state(state)
        self.state = state
        self.logger = Logger(state) if logger is None else logger
        self.log_traces = log_traces
        self._serves = serves
        self._passes = ObservableList(all_passes(algorithm_passes), check_pass)
        self._subscriptions: ObservableList[Subscription] = ObservableList((), check=lambda _: None)
        self._first_calls = {event.value: (partial(self._run_first, event),) for event in Event}
        self.calls: dict[str, tuple[Call, ...]] = {**self._first_calls}
        self._plan: Plan | None = None
        self._warned: set[str] = set()
        self._closed = self._may_evaluate = False
        self._acts = Acts(state)
        self._ran: set[Event] = set()
        if algorithms is not None:
            state.algorithms = algorithms
        state.on_components_change(self.forget_plan)
        for components in (self.logger.destinations, self._passes, self._subscriptions):
            components.on_change.append(self.forget_plan)
        # Now, so that conflicts raise an error here and not at the first event.
        self.explain()

    def run_event(self, event: Event | str) -> None:
        """Run an event: make its calls in the order of the plan.

        Args:
            event: The event or its value, ``"batch_end"``.

        Raises:
            ValueError: There is no such event.
            RuntimeError: The engine is closed.
        """
        for call in self.calls[event if event in self.calls else _event_of(event)]:
            call()

    def on(
        self, event: Event | str, function: Callable[[State, Logger], object], every: Time | str | int | None = None
    ) -> Subscription:
        """Call a function at an event, after the callbacks and before the loggers, until the subscription is removed.

        Args:
            event: The event or its value, ``"batch_end"``.
            function: ``f(state, logger)``.
            every: How often: a time, a string (``"10ba"``) or a number of epochs; each time if None, never if 0. It
                depends on the clock alone; see :meth:`Callback.intervals`.

        Returns:
            The subscription: ``subscription.remove()`` ends it.

        Raises:
            ValueError: There is no such event, or ``every`` could never be due there.
            TypeError: ``function`` cannot be called, or ``every`` is no length of time.
            RuntimeError: The engine is closed.

        Example:
            >>> from composer.core import State
            >>> engine = Engine(State(model=None))
            >>> def report(state, logger):
            ...     print(state.timestamp.batch)
            >>> subscription = engine.on("batch_end", report, every="10ba")
            >>> print(engine.explain().entries[Event.BATCH_END][0].every)
            10ba
        """
        self.check_open()
        event = _event_of(event)
        if not callable(function):
            raise TypeError(f"function must be a function f(state, logger), got {function!r}.")
        interval = None if every is None else checked_interval(every, event, "Engine.on")
        subscription = Subscription(event, function, interval, self._subscriptions)
        self._subscriptions.append(subscription)
        return subscription

    @property
    def algorithm_passes(self) -> ObservableList[AlgorithmPass]:
        """The passes, in the order in which they are applied."""
        return self._passes

    @algorithm_passes.setter
    def algorithm_passes(self, passes: Iterable[AlgorithmPass]) -> None:
        self._passes[:] = passes

    def register_pass(self, algorithm_pass: AlgorithmPass, index: int = -1) -> None:
        """Insert a pass at ``index`` of the passes, or after them (-1).

        Raises:
            TypeError: ``algorithm_pass`` is not a function.
        """
        self._passes.insert(len(self._passes) if index == -1 else index, algorithm_pass)

    def explain(self, *, verbose: bool = False) -> Plan:
        """Return the plan: what runs at which event, in which order and why. Print it for a table.

        After a training it also has what each algorithm did.

        Args:
            verbose: Whether the table shows the events of callbacks and loggers, too; else one line names them.
        """
        if self._plan is None:
            self._plan = build_plan(
                self.state.algorithms,
                self.state.callbacks,
                self.logger.destinations,
                self._passes,
                self._subscriptions,
                self._serves,
            )
            # Each change of components makes another plan, and each warning is given once.
            fresh = [warning for warning in self._plan.warnings if warning not in self._warned]
            self._warned.update(fresh)
            for warning in fresh:
                warnings.warn(warning, stacklevel=caller_level())
        plan, asked = self._plan, overrides_match
        if self._acts.has_begun:
            named = zip(plan.algorithms, self.state.algorithms, strict=True)
            acted = {one.name: self._acts.of(one.name, each, asked=asked(each)) for one, each in named}
            plan = attrs.evolve(plan, acted=acted)
        return attrs.evolve(plan, verbose=True) if verbose else plan

    def restore(self) -> None:
        """Call :meth:`Algorithm.restore` of all algorithms, after an error in an evaluation or prediction."""
        for algorithm in self.state.algorithms:
            algorithm.restore(self.state)

    def close(self, *, may_evaluate: bool = False) -> None:
        """Close callbacks and loggers, once; the engine runs no further event.

        Args:
            may_evaluate: Whether algorithms still run at the events of evaluations and predictions, as after an error
                in a training.

        Raises:
            BaseException: The first error, after all have been closed; Ctrl-C and ``SystemExit`` before other errors.
        """
        if self._closed:
            return
        self._closed, self._may_evaluate = True, may_evaluate
        self.calls.update(self._first_calls)
        list(self._acts.end_of_first_batch())  # removes the hooks, if the first batch has failed
        # Loggers last, because callbacks may log what they have found when they are closed.
        components = sorted(self._callbacks(), key=lambda one: isinstance(one, LoggerDestination))
        closing: list[Call] = [partial(component.close, self.state, self.logger) for component in components]
        num_loggers = sum(isinstance(one, LoggerDestination) for one in components)
        closing.insert(len(closing) - num_loggers, self.logger.deliver)  # including the last metrics of the callbacks
        try:
            _call_each([*closing, *(component.post_close for component in components)], "While closing", BaseException)
        finally:
            self.logger = Logger(self.state)  # without the closed ones

    _close = close  # which programs for MosaicML Composer unregister from atexit

    def check_open(self) -> None:
        """Check that events can still be run.

        Raises:
            RuntimeError: The engine is closed.
        """
        if self._closed:
            raise RuntimeError(
                "The engine is closed and runs no further event: close() was called, or a run ended by an error, after "
                "which a Trainer still evaluates, predicts and saves. Make a new Trainer or Engine."
            )

    def forget_plan(self) -> None:
        """Make the plan again at the next event, with methods that were set on components."""
        # The next event makes the new plan: no event checks whether the plan is valid.
        self._plan = None
        if "calls" in vars(self):  # else it is a deep copy, whose lists of components are filled first
            self.calls.update(self._first_calls)

    def _run_first(self, event: Event) -> None:
        """Run an event for the first time since the plan has changed."""
        for call in self._compile(event):
            call()

    def _compile(self, event: Event) -> tuple[Call, ...]:
        if not (self._may_evaluate and (event.is_eval or event.is_predict)):
            self.check_open()
        plan = self.explain()
        entries, has_batches = plan.entries, not self._ran.isdisjoint(_WITH_A_BATCH)
        if not self._closed:
            self._ran.add(event)
            if event is Event.EPOCH_END and has_batches:
                self._warn_of_missing(entries)
            if event is Event.BEFORE_FORWARD:
                self._acts.begin([one.name for one in plan.algorithms])
            elif event is Event.BATCH_END:
                for sentence in self._acts.end_of_first_batch():
                    warnings.warn(sentence, NoEffectWarning, stacklevel=caller_level())
        own = [one for one in entries.get(event, ()) if not self._closed or one.kind == "algorithm"]
        calls = self._calls(event, own)
        if event is Event.FIT_START:
            calls = (self._acts.reset_at_start, *calls)
        if event is Event.FIT_END:
            calls = (*calls, self._warn_of_idle)
        # The end of an epoch without batches is not enough for the check of the loop: the next one is checked again.
        if event is not Event.EPOCH_END or has_batches:
            self.calls[event.value] = calls
        return calls

    def _calls(self, event: Event, entries: Sequence[Entry]) -> tuple[Call, ...]:
        calls = tuple(self._call(event, order, entry) for order, entry in enumerate(entries))
        if event in _DELIVERING:
            loggers = sum(entry.kind == "logger" for entry in entries)
            calls = (*calls[: len(calls) - loggers], self.logger.deliver, *calls[len(calls) - loggers :])
        if event in MODEL_EVENTS and any(entry.kind != "logger" for entry in entries):
            calls = self._with_checks(event, entries, calls)
        if event is Event.FIT_END:  # a callback that fails does not prevent the save of the training by another one
            algorithms = sum(entry.kind == "algorithm" for entry in entries)
            calls = (*calls[:algorithms], partial(_call_each, calls[algorithms:], "At fit_end"))
        unwrapped: Call = partial(_call_all, calls)
        call = unwrapped
        for wrapper in self._wrappers("wrap_event"):
            call = wrapper.wrap_event(event, call)
        # Without a wrapper they are made one by one, which saves a call of Python at each event.
        return calls if call is unwrapped else (call,)

    def _with_checks(self, event: Event, entries: Sequence[Entry], calls: Sequence[Call]) -> tuple[Call, ...]:
        # After each component by itself, so that the error names the one that replaced parameters.
        ownership = Ownership(self.state)
        checked: list[Call] = [ownership.begin]
        for entry, call in zip(entries, calls, strict=True):
            is_algorithm = entry.kind == "algorithm"
            checked.append(partial(call_with_own_draws, self.state, entry.key, event, call) if is_algorithm else call)
            if entry.kind != "logger":
                checked.append(partial(ownership.check, entry.key))
        return (*checked, ownership.end)

    def _call(self, event: Event, order: int, entry: Entry) -> Call:
        component, state, logger = entry.component, self.state, self.logger
        call: Call = partial(entry.call, state, logger)
        if isinstance(component, Algorithm) and self.log_traces:
            trace = Trace(entry.key, event, order=order)
            call = partial(_run_traced, component, event, state, logger, self._acts.calls, trace)
        elif isinstance(component, Algorithm) and entry.asked:
            call = partial(_run_if_matching, component, event, state, logger, self._acts.calls, entry.key)
        for wrapper in self._wrappers("wrap_call"):
            if wrapper is not component:
                call = wrapper.wrap_call(event, entry.key, entry.kind, call)
        return only_when_due(call, entry.every, event, state)

    def _wrappers(self, method: str) -> list[Callback]:
        components = () if self._closed else self._callbacks()
        return [component for component in components if overrides(component, Callback, method)]

    def _callbacks(self) -> list[Callback]:
        return [*self.state.callbacks, *self.logger.destinations]

    def _warn_of_missing(self, entries: Mapping[Event, Sequence[Entry]]) -> None:
        """Warn once of each event that algorithms need and that no loop has run in an epoch."""
        for event in Event:
            keys = [one.key for one in entries.get(event, ()) if one.stage is not None]  # others are asked everywhere
            if event in _IN_EVERY_EPOCH and event not in self._ran and keys and event.value not in self._warned:
                self._warned.add(event.value)
                warnings.warn(
                    f"{', '.join(keys)} {'runs' if len(keys) == 1 else 'run'} at {event.value!r}, but a whole epoch "
                    "passed without that event, so nothing is done there. Add "
                    f'engine.run_event("{event.value}") to the loop: {event.place}.',
                    stacklevel=caller_level(),
                )

    def _warn_of_idle(self) -> None:
        """Warn once about each algorithm that has not acted in the training; its layers had a warning before."""
        plan = self.explain()
        if not self._acts.from_start or self.state.stop_reason == STOPPED_BY_SIGNAL:  # a resumed run may still act
            return
        stop = "" if self.state.stop_reason is None else ", which was stopped (ignore this if it is resumed)"
        for name, algorithm in zip([one.name for one in plan.algorithms], self.state.algorithms, strict=True):
            # An algorithm that runs at the end reports this itself, with its own reason.
            is_reported = name in self._warned or Event.FIT_END in algorithm.runs_at_events()
            if plan.acted.get(name) == (0, algorithm.acted_unit) and not is_reported:
                self._warned.add(name)
                text = f"{name} has not acted in this training{stop}. {algorithm.idle_reason}"
                warnings.warn(text, NoEffectWarning, stacklevel=caller_level())


def _event_of(event: Event | str) -> Event:
    try:
        return Event(event)
    except ValueError:
        guess = nearest(event, [one.value for one in Event], ";")
        raise ValueError(f"There is no event {event!r}{guess} The events are {', '.join(Event)}.") from None


def _call_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _call_each(calls: Sequence[Call], when: str, caught: type[BaseException] = Exception) -> None:
    """Make all calls, then raise the first error, with notes of the others; Ctrl-C and ``SystemExit`` before others."""
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        except caught as error:
            errors.append(error)
    errors.sort(key=lambda error: isinstance(error, Exception))
    for also in errors[1:]:
        errors[0].add_note(f"{when}, this failed, too: {type(also).__name__}: {also}")
    if errors:
        raise errors[0]


def _run_if_matching(
    algorithm: Algorithm, event: Event, state: State, logger: Logger, calls: Counter[str], key: str
) -> None:
    if algorithm.match(event, state):
        calls[key] += event is not Event.FIT_END
        algorithm.apply(event, state, logger)


def _run_traced(
    algorithm: Algorithm, event: Event, state: State, logger: Logger, calls: Counter[str], trace: Trace
) -> None:
    runs = algorithm.match(event, state)
    calls[trace.name] += runs and event is not Event.FIT_END
    exit_code = algorithm.apply(event, state, logger) if runs else None
    trace = attrs.evolve(trace, exit_code=exit_code, run=runs)
    logger.log_traces({f"algorithm_traces/{trace.name}/{event.value}": trace})

"""The base class of callbacks: one method for each event, of which a subclass overrides those it needs."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from composer.core.event import Event
from composer.core.interval import checked_interval
from composer.core.serializable import Serializable

if TYPE_CHECKING:
    from composer.core.interval import Call
    from composer.core.logger import Logger
    from composer.core.plan import Entry
    from composer.core.state import State
    from composer.core.time import Time

__all__ = ["Callback", "hook_of", "intervals_of", "overrides"]


class Callback(Serializable):
    """Observes a run without changing its results.

    Each event has a method of its name, called with the state and the logger; only overridden methods are called. To
    observe every event, override :meth:`run_event` instead.

    Example:
        >>> class PrintEpoch(Callback):
        ...     def epoch_end(self, state, logger):
        ...         print(state.timestamp.epoch)
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Warn of methods with the arguments of a hook and almost the name of an event: they would not be called."""
        super().__init_subclass__(**kwargs)
        for name, method in vars(cls).items():
            if inspect.isfunction(method) and [*inspect.signature(method).parameters] == ["self", "state", "logger"]:
                close = difflib.get_close_matches(name, [*Event], n=1, cutoff=0.85)
                if close and not hasattr(Callback, name) and not name.startswith("_"):
                    warnings.warn(
                        f"{cls.__name__}.{name} is called at no event, as none has this name: did you mean "
                        f"{str(close[0])!r}? A method that is no hook can have other names of its arguments.",
                        UserWarning,
                        stacklevel=2,
                    )

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Called at every event, if overridden; calls the event's method."""
        getattr(self, event.value)(state, logger)

    def intervals(self) -> Mapping[Event | str, Time | str | int]:
        """Return the intervals of hooks, ``{Event.BATCH_END: "10ba"}``; other hooks are called each time.

        Called when the plan is made. Whether a hook is due depends on the clock alone, so it is the same after a
        resume: ``"10ba"`` is due at the ``BATCH_END`` of the 10th, 20th, … batch. At events within a batch, which the
        clock has not counted yet, it is due in the batch after. 0 is never; a whole number counts epochs.
        """
        return {}

    def wrap_call(self, event: Event, entry: Entry, call: Call) -> Call:
        """Return a replacement of a call at an event: ``call`` itself, or a function that makes the call.

        If overridden, it is called for every call of an algorithm, callback, logger or subscription except its own,
        when the calls of an event are compiled. If several callbacks wrap, the first of the list is the innermost.

        Args:
            event: The event.
            entry: The component that is called, as in the plan.
            call: The call, without arguments.
        """
        return call

    def wrap_event(self, event: Event, call: Call) -> Call:
        """Return a replacement of all calls of an event, also if there are none; as :meth:`wrap_call`."""
        return call

    def close(self, state: State, logger: Logger) -> None:
        """Called once when the engine is closed, also after an error, to finish files and stop threads."""

    def post_close(self) -> None:
        """Called once after every callback was closed, to release what other callbacks may need until then."""

    def init(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.INIT`."""

    def before_load(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BEFORE_LOAD`."""

    def after_load(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.AFTER_LOAD`."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.FIT_START`."""

    def iteration_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.ITERATION_START`."""

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EPOCH_START`."""

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BEFORE_DATALOADER`."""

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.AFTER_DATALOADER`."""

    def batch_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BATCH_START`."""

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BEFORE_TRAIN_BATCH`."""

    def before_forward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BEFORE_FORWARD`."""

    def after_forward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.AFTER_FORWARD`."""

    def before_loss(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BEFORE_LOSS`."""

    def after_loss(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.AFTER_LOSS`."""

    def before_backward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BEFORE_BACKWARD`."""

    def after_backward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.AFTER_BACKWARD`."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.AFTER_TRAIN_BATCH`."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BATCH_END`."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BATCH_CHECKPOINT`."""

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EPOCH_END`."""

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EPOCH_CHECKPOINT`."""

    def iteration_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.ITERATION_END`."""

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.ITERATION_CHECKPOINT`."""

    def fit_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.FIT_END`."""

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_BEFORE_ALL`."""

    def eval_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_START`."""

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_BATCH_START`."""

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_BEFORE_FORWARD`."""

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_AFTER_FORWARD`."""

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_BATCH_END`."""

    def eval_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_END`."""

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_AFTER_ALL`."""

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_STANDALONE_START`."""

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_STANDALONE_END`."""

    def predict_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.PREDICT_START`."""

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.PREDICT_BATCH_START`."""

    def predict_before_forward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.PREDICT_BEFORE_FORWARD`."""

    def predict_after_forward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.PREDICT_AFTER_FORWARD`."""

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.PREDICT_BATCH_END`."""

    def predict_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.PREDICT_END`."""


def overrides(component: object, base: type, method: str) -> bool:
    """Return whether a component overrides a method of ``base``.

    Example:
        >>> class Watch(Callback):
        ...     def fit_end(self, state, logger):
        ...         print("done")
        >>> overrides(Watch(), Callback, "fit_end"), overrides(Watch(), Callback, "fit_start")
        (True, False)
    """
    # The attribute of the object, not of its class: a method may have been set on the object.
    return getattr(getattr(component, method), "__func__", None) is not getattr(base, method)


def hook_of(callback: Callback, event: Event) -> Callable[..., object] | None:
    """Return the overridden hook of a callback for an event, as ``f(state, logger)``; None if there is none."""
    if overrides(callback, Callback, "run_event"):
        return partial(callback.run_event, event)
    return getattr(callback, event.value) if overrides(callback, Callback, event.value) else None


def intervals_of(callback: Callback) -> Mapping[Event, Time]:
    """Return the intervals of a callback's hooks by event.

    Raises:
        TypeError: ``callback.intervals()`` returns no mapping, or an interval is no length of time.
        ValueError: It names an event that does not exist, or an interval that could never be due there.
    """
    who = type(callback).__name__
    given = callback.intervals()
    if not isinstance(given, Mapping):
        raise TypeError(f'{who}.intervals() must map events to times, {{Event.BATCH_END: "10ba"}}, got {given!r}.')
    intervals = {}
    for event, every in given.items():
        if event not in {*Event}:
            raise ValueError(
                f"{who}.intervals() names {event!r}, which is no event; the events are {', '.join(Event)}."
            )
        intervals[Event(event)] = checked_interval(every, Event(event), who)
    return intervals

"""The fields of the state that algorithms read and write, and those that a host of algorithms serves."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import attrs

from composer.core.event import Event

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from composer.core.plan import Entry

__all__ = ["ALWAYS_SERVED", "FIELDS", "OPTIONAL_EVENTS", "FieldsByEvent", "ServedFields", "fields_at"]

FIELDS = frozenset(
    {
        "algorithms",
        "batch",
        "batch.input",
        "batch.target",
        "callbacks",
        "dataloader",
        "dataloader_len",
        "eval_metrics",
        "evaluators",
        "gradients",
        "iteration_length",
        "loss",
        "losses",
        "max_duration",
        "model",
        "optimizers",
        "outputs",
        "scaler",
        "schedulers",
        "timestamp",
        "train_dataloader",
        "train_metrics",
    }
)
"""The fields that ``Algorithm.reads`` and ``Algorithm.writes`` may contain. Further items of a batch are
``"batch.<key>"``; ``"batch"`` is all of it. ``"losses"`` is the loss of each sample,
``State.compute_loss(outputs, batch, reduction="none")``."""

ALWAYS_SERVED = frozenset(
    {
        "component_key",
        "dataloader_label",
        "device",
        "device_train_microbatch_size",
        "microbatch",
        "precision",
        "profiler",
        "rank",
        "rank_zero_seed",
        "run_name",
        "seed",
    }
)
"""Constants of a run: they need not be declared, and every host serves them."""

OPTIONAL_EVENTS = frozenset(event for event in Event if event.startswith(("eval_", "predict_", "iteration_")))


class FieldsByEvent(frozenset[str]):
    """The fields that an algorithm needs, by event; a value for ``Algorithm.reads`` and ``Algorithm.writes``.

    It is the set of all these fields. A plain set means that every field is needed at every event of the algorithm.

    Args:
        fields: The fields of each event.

    Example:
        >>> reads = FieldsByEvent({Event.BEFORE_FORWARD: {"batch.input"}, Event.AFTER_LOSS: {"loss"}})
        >>> "loss" in reads, fields_at(reads, Event.BEFORE_FORWARD)
        (True, frozenset({'batch.input'}))
    """

    __slots__ = ("by_event",)
    by_event: Mapping[Event, frozenset[str]]

    def __new__(cls, fields: Mapping[Event, Iterable[str]]) -> FieldsByEvent:
        """Return the set of all fields."""
        by_event = _by_event(fields)
        self = super().__new__(cls, chain.from_iterable(by_event.values()))
        self.by_event = by_event
        return self

    def __reduce__(self) -> tuple[type[FieldsByEvent], tuple[Mapping[Event, frozenset[str]]]]:
        return type(self), (self.by_event,)


def fields_at(declared: AbstractSet[str], event: Event) -> AbstractSet[str]:
    """Return the fields in ``Algorithm.reads`` or ``Algorithm.writes`` that are needed at an event."""
    return declared.by_event.get(event, frozenset()) if isinstance(declared, FieldsByEvent) else declared


def _by_event(fields: Mapping[Event, Iterable[str]]) -> dict[Event, frozenset[str]]:
    strings = [event for event, names in fields.items() if isinstance(names, str)]
    if strings:
        raise TypeError(
            f"fields must map events to sets of fields, got the string {fields[strings[0]]!r}; write a set."
        )
    return {Event(event): frozenset(names) for event, names in fields.items()}


def _check_known(served: object, attribute: attrs.Attribute[Any], by_event: Mapping[Event, frozenset[str]]) -> None:
    del served
    names = {name for name in chain.from_iterable(by_event.values()) if not name.startswith("batch.")}
    unknown = sorted(names - FIELDS - ALWAYS_SERVED)
    if unknown:
        raise ValueError(
            f"{attribute.name} has the unknown field {unknown[0]!r}; use 'batch.<key>' or one of "
            f"{', '.join(sorted(FIELDS))}."
        )


@attrs.frozen
class ServedFields:
    """The events that a host of algorithms runs, and the fields of the state that it serves there.

    A host is a training loop with an :class:`Engine`. Pass its declaration to the engine, which refuses algorithms that
    need more. Events without any field are events that the host does not run. Events of evaluations, predictions and
    iterations may be missing, as they need not happen in a training.

    Args:
        host: The name of the host, for errors.
        readable: The fields with current values, by event. ``"batch"`` includes every ``"batch.<key>"``.
        writable: The fields whose new values the host uses, by event.

    Raises:
        TypeError: The fields of an event are a string.
        ValueError: An event or a field does not exist.

    Example:
        >>> from composer.core import Algorithm, Engine, Stage, State
        >>> class Smooth(Algorithm):
        ...     runs_at = {Event.BEFORE_LOSS: Stage.LABEL}
        ...     reads = writes = {"batch.target"}
        ...     def apply(self, event, state, logger): ...
        >>> loop = ServedFields("MyLoop", readable={Event.BEFORE_LOSS: {"batch", "outputs"}}, writable={})
        >>> Engine(State(model=None), algorithms=Smooth(), serves=loop)
        Traceback (most recent call last):
        ValueError: Smooth cannot run in MyLoop: it writes 'batch.target' at 'before_loss', which MyLoop does not ...
    """

    host: str
    readable: Mapping[Event, frozenset[str]] = attrs.field(converter=_by_event, validator=_check_known)
    writable: Mapping[Event, frozenset[str]] = attrs.field(converter=_by_event, validator=_check_known)

    def check(self, entries: Mapping[Event, Sequence[Entry]]) -> None:
        """Refuse the algorithms of a plan that need an event or a field which the host does not serve.

        An algorithm without declared events runs where its ``match`` returns True: each of its fields must be served at
        any event.

        Raises:
            ValueError: For all such algorithms, with their names, the host's, the fields and the events.
        """
        unserved: dict[str, list[str]] = {}
        for event, called in entries.items():
            for entry in called:
                if entry.kind == "algorithm" and entry.stage is not None:
                    unserved.setdefault(entry.key, []).extend(self._unserved(entry, event))
                elif entry.kind == "algorithm" and event is Event.INIT:
                    unserved[entry.key] = self._unserved(entry, None)
        problems = [
            f"{key} cannot run in {self.host}: it {' and '.join(needs)}, which {self.host} does not serve. "
            f"Remove {key}, or serve this in {self.host}."
            for key, needs in unserved.items()
            if needs
        ]
        if problems:
            raise ValueError("\n".join(problems))

    def _unserved(self, entry: Entry, event: Event | None) -> list[str]:
        """Return what an algorithm needs at an event, or at any event if None, that the host does not serve."""
        if event is not None and event not in {*self.readable, *self.writable}:
            return [] if event in OPTIONAL_EVENTS else [f"runs at {event.value!r}"]
        needs = []
        for verb, fields, by_event in (("reads", entry.reads, self.readable), ("writes", entry.writes, self.writable)):
            served = frozenset().union(*by_event.values()) if event is None else by_event.get(event, frozenset())
            names = [
                repr(field)
                for field in fields
                if field not in ALWAYS_SERVED | served and not (field.startswith("batch.") and "batch" in served)
            ]
            if names:
                where = "some event" if event is None else repr(event.value)
                needs.append(f"{verb} {' and '.join(names)} at {where}")
        return needs

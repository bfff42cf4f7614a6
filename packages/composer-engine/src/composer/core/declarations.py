"""What algorithms declare: the fields that they read and write, and the resources that only one of them may own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, combinations
from typing import Any

import attrs

from composer.core.event import Event

FIELDS = frozenset({
    "batch", "batch.input", "batch.target", "outputs", "loss", "losses", "gradients",
    "model", "optimizers", "schedulers", "scaler", "algorithms", "callbacks",
    "train_dataloader", "dataloader", "dataloader_len", "evaluators", "train_metrics", "eval_metrics",
    "timestamp", "max_duration", "iteration_length",
})  # fmt: skip
"""The fields that ``Algorithm.reads`` and ``Algorithm.writes`` may contain. Further items of a batch are
``"batch.<key>"``; ``"batch"`` is all of it. ``"losses"`` is the loss of each sample,
``State.compute_loss(outputs, batch, reduction="none")``."""

ALWAYS_SERVED = frozenset({
    "run_name", "rank", "rank_zero_seed", "seed", "device", "precision", "profiler", "component_key",
    "dataloader_label", "device_train_microbatch_size", "microbatch",
})  # fmt: skip
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

    # That of frozenset would pass the fields to __new__ instead of the mapping.
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

    A host is a training loop with an :class:`Engine`. Pass its declaration to the engine, which rejects algorithms that
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


class ExclusiveResource(str):
    """A resource that only one algorithm of a run may own, with a remedy for conflicts.

    It is a string, so one algorithm may declare an ``ExclusiveResource`` and another the same plain string.

    Args:
        words: The name of the resource, as it follows "must have": ``"the layer norms"``.
        remedy: What to do if two algorithms own it, in a sentence.

    Example:
        >>> norms = ExclusiveResource("the layer norms", remedy="Each makes them faster in its own way: keep one.")
        >>> norms == "the layer norms", norms.remedy
        (True, 'Each makes them faster in its own way: keep one.')
    """

    __slots__ = ("remedy",)
    remedy: str

    def __new__(cls, words: str, remedy: str = "") -> ExclusiveResource:
        """Return the name with its remedy."""
        resource = super().__new__(cls, words)
        resource.remedy = remedy
        return resource

    def __reduce__(self) -> tuple[type[ExclusiveResource], tuple[str, str]]:
        return type(self), (str(self), self.remedy)


def owned(words: str, remedy: str) -> frozenset[ExclusiveResource]:
    """Return the declaration of an algorithm that owns one resource."""
    return frozenset({ExclusiveResource(words, remedy)})


@attrs.frozen
class Conflict:
    """Two algorithms that cannot run together.

    Args:
        first, second: The algorithms, in the order of the list.
        owned: The resources that both own.
        remedies: The remedies of those resources that have one.
    """

    first: Any
    second: Any
    owned: tuple[str, ...]
    remedies: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = [type(self.first).__name__, type(self.second).__name__]
        who = f"Two {names[0]}" if names[0] == names[1] else " and ".join(names)
        text = (
            f"{who} cannot run together: each must have {' and '.join(self.owned)} to itself. "
            f"Remove one: {self.first!r} or {self.second!r}."
        )
        return " ".join([text, *self.remedies])


class AlgorithmConflictError(ValueError):
    """Algorithms of a run cannot work together; ``conflicts`` lists the pairs, and the message has a line for each.

    Example:
        >>> AlgorithmConflictError(()).conflicts
        ()
    """

    def __init__(self, conflicts: Iterable[Conflict]) -> None:
        self.conflicts = tuple(conflicts)
        super().__init__("\n".join(map(str, self.conflicts)))

    # That of an exception would pass the message to __init__ instead of the conflicts.
    def __reduce__(self) -> tuple[type[AlgorithmConflictError], tuple[tuple[Conflict, ...]]]:
        return type(self), (self.conflicts,)


def find_conflicts(algorithms: Sequence[Any]) -> tuple[Conflict, ...]:
    """Return the pairs of algorithms that own the same resource.

    Example:
        >>> find_conflicts([])
        ()
    """
    return tuple(
        Conflict(first, second, tuple(sorted(map(str, shared))), _remedies(shared, first, second))
        for first, second in combinations(algorithms, 2)
        if (shared := {*first.owns} & {*second.owns})
    )


def check_conflicts(algorithms: Sequence[Any]) -> None:
    """Raise an error if algorithms own the same resource.

    Raises:
        AlgorithmConflictError: For all pairs, with both names, the resource and the remedy.
    """
    conflicts = find_conflicts(algorithms)
    if conflicts:
        raise AlgorithmConflictError(conflicts)


def _remedies(shared: set[str], *algorithms: Any) -> tuple[str, ...]:
    # Only one of the two may have declared a remedy.
    declared = [one for algorithm in algorithms for one in sorted(algorithm.owns) if one in shared]
    texts = [one.remedy for one in declared if isinstance(one, ExclusiveResource) and one.remedy]
    return tuple(dict.fromkeys(texts))

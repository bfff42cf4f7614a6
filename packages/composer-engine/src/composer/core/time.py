"""Time: durations in seven units, and the timestamp of a run."""

from __future__ import annotations

import datetime as dt
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Generic, NamedTuple, SupportsIndex, cast

import attrs
import typing_extensions

from composer.core.checks import StoredAsObject, nearest

Value = typing_extensions.TypeVar("Value", default=Any)


class TimeUnit(StrEnum):
    """The unit of a time.

    A unit is found by its value (``"ep"``), its name in singular or plural (``"epoch"``, ``"epochs"``).

    Example:
        >>> TimeUnit("epochs") is TimeUnit.EPOCH
        True
    """

    ITERATION = "iter"
    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"  # noqa: S105  (a unit of text)
    DURATION = "dur"
    SECOND = "sec"

    __hash__ = str.__hash__  # an enum's own is a call of Python, and steps look units up

    @classmethod
    def _missing_(cls, value: object) -> TimeUnit | None:
        word = str(value).strip().lower()
        return next((unit for unit in cls if word in {unit.value, unit.name.lower(), unit.plural}), None)

    @property
    def plural(self) -> str:
        """The plural of the unit: ``"epochs"``."""
        return "batches" if self is TimeUnit.BATCH else f"{self.name.lower()}s"


_MICROSECOND, _SECOND = dt.timedelta(microseconds=1), 1_000_000
_FRACTIONAL = (TimeUnit.DURATION, TimeUnit.SECOND)
_TIMESTRING = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Z]+)\s*")
_TIMEDELTA = re.compile(r"\s*(?:(\d+)\s*d)?\s*(?:(\d+)\s*h)?\s*(?:(\d+)\s*m(?:in)?)?\s*(?:(\d+(?:\.\d+)?)\s*s)?\s*")
_UNITS_SENTENCE = ", ".join(f"{unit.value!r} ({unit.name.lower()})" for unit in TimeUnit)


def _to_unit(unit: TimeUnit | str) -> TimeUnit:
    if type(unit) is TimeUnit:  # nearly always, and ten times as fast
        return unit
    try:
        return TimeUnit(unit)
    except ValueError:
        raise ValueError(f"unit must be one of {_UNITS_SENTENCE}, got {unit!r}.") from None


class MixedUnitsError(ValueError, RuntimeError):
    """Times of different units were compared or combined. It is also a RuntimeError, as in MosaicML Composer."""


def _combining(operation: Callable[[Any, Any], int | float]) -> Callable[[Time, object], Time]:
    """Return a method of two times, or of a time and a number in its unit."""

    def combined(self: Time, other: object) -> Time:
        number = self._number(other)
        return NotImplemented if number is None else Time(operation(self.value, number), self.unit)

    return combined


@functools.total_ordering
@attrs.frozen(eq=False, order=False, repr=False)
class Time(StoredAsObject, Generic[Value]):
    """A time in one unit, such as ten epochs: ``Time(10, "ep")``, or as a string, ``"10ep"``.

    Two times of the same unit can be added, subtracted, compared and divided (the quotient is a ``"dur"``, the fraction
    of one in the other). A number operand is in the time's unit; a string operand is parsed as a time. A product is
    truncated to a whole number if the unit requires it: ``Time(10, "ep") * 0.25`` is two epochs.

    A time equals its number and has its hash. It also equals the string of the same time, which has another hash: use
    times as keys. ``Time[int]`` and ``Time[float]`` are only for annotations.

    Args:
        value: The number of units. It must be whole, except for durations (fractions of the training) and seconds.
        unit: A :class:`TimeUnit`, its value (``"ep"``) or its name (``"epoch"``).

    Raises:
        ValueError: The unit does not exist, or the value is not a finite number that fits it. Operations on times of
            different units raise one that is also a RuntimeError.
        TypeError: The value is not a number.

    Example:
        >>> Time(10, "epoch") == Time.from_timestring("10ep")
        True
        >>> Time(1, "ep") + "2ep", Time(1, "ba") / Time(4, "ba"), Time(10, "ba") * Time(0.5, "dur")
        (Time(3, TimeUnit.EPOCH), Time(0.25, TimeUnit.DURATION), Time(5, TimeUnit.BATCH))
    """

    value: int | float = attrs.field()
    unit: TimeUnit = attrs.field(converter=_to_unit)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "value", _fitting_value(self.value, self.unit))

    @classmethod
    def from_iteration(cls, iteration: int) -> Time:
        """Return ``iteration`` iterations: ``Time(iteration, "iter")``."""
        return cls(iteration, TimeUnit.ITERATION)

    @classmethod
    def from_epoch(cls, epoch: int) -> Time:
        """Return ``epoch`` epochs: ``Time(epoch, "ep")``."""
        return cls(epoch, TimeUnit.EPOCH)

    @classmethod
    def from_batch(cls, batch: int) -> Time:
        """Return ``batch`` batches: ``Time(batch, "ba")``."""
        return cls(batch, TimeUnit.BATCH)

    @classmethod
    def from_sample(cls, sample: int) -> Time:
        """Return ``sample`` samples: ``Time(sample, "sp")``."""
        return cls(sample, TimeUnit.SAMPLE)

    @classmethod
    def from_token(cls, token: int) -> Time:
        """Return ``token`` tokens: ``Time(token, "tok")``."""
        return cls(token, TimeUnit.TOKEN)

    @classmethod
    def from_duration(cls, duration: float) -> Time:
        """Return a fraction of the training: ``Time(duration, "dur")``."""
        return cls(duration, TimeUnit.DURATION)

    @classmethod
    def from_timedelta(cls, timestring: str | dt.timedelta) -> Time:
        """Return seconds from a :class:`datetime.timedelta` or a string such as ``"1h20m40s"``.

        Example:
            >>> Time.from_timedelta("1h20m")
            Time(4800, TimeUnit.SECOND)
        """
        if isinstance(timestring, dt.timedelta):
            seconds = timestring.total_seconds()
        else:
            match = _TIMEDELTA.fullmatch(timestring)
            if match is None or not any(match.groups()):
                raise ValueError(f"timestring must be a time such as '1h20m40s' or '30min', got {timestring!r}.")
            days, hours, minutes, rest = (float(part or 0) for part in match.groups())
            seconds = dt.timedelta(days, rest, hours=hours, minutes=minutes).total_seconds()
        return cls(int(seconds) if seconds == int(seconds) else seconds, TimeUnit.SECOND)

    @classmethod
    def from_timestring(cls, timestring: str, *, name: str = "A time") -> Time:
        """Parse a string such as ``"10ep"``, ``"1_000ba"``, ``"1e6tok"`` or ``"0.7dur"``; ``"1h30min"`` is in seconds.

        Args:
            timestring: The string.
            name: The name of the parameter, with which errors begin.

        Raises:
            TypeError: ``timestring`` is not a string.
            ValueError: The string is not a number followed by a unit.
        """
        if not isinstance(timestring, str):
            raise TypeError(f"{name} must be a string such as '10ep', got {timestring!r}.")
        if (clock := _TIMEDELTA.fullmatch(timestring)) is not None and any(clock.groups()):
            return cls.from_timedelta(timestring)
        number, word = (m[1].replace("_", ""), m[2]) if (m := _TIMESTRING.fullmatch(timestring)) else ("", "")
        try:
            unit = TimeUnit(word)
        except ValueError:
            raise ValueError(
                f"{name} must be a number followed by a unit, such as '10ep'; got {timestring!r}"
                f"{nearest(word, [one.plural for one in TimeUnit])} Units: {_UNITS_SENTENCE}, 'min', 'h', 'd'."
            ) from None
        try:
            return cls(int(number) if number.lstrip("+-").isdigit() else float(number), unit)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    @classmethod
    def from_input(
        cls, i: Time | str | int, default_int_unit: TimeUnit | str | None = None, *, name: str = "A length of time"
    ) -> Time:
        """Return a time from a time, a string, or a whole number of ``default_int_unit``.

        Args:
            i: The time.
            default_int_unit: The unit of a whole number; None rejects numbers.
            name: The name of the parameter, with which errors begin.

        Raises:
            TypeError: ``i`` is none of these, or a number without a default unit.
            ValueError: The string is not a number followed by a unit.
        """
        if isinstance(i, Time):
            return i
        if isinstance(i, str):
            return cls.from_timestring(i, name=name)
        unit = None if default_int_unit is None else _to_unit(default_int_unit)
        if unit is not None and isinstance(i, SupportsIndex) and not isinstance(i, bool):
            return cls(i, unit)
        wanted = "a Time or a string such as '10ep'" + ("" if unit is None else f", or a whole number of {unit.plural}")
        raise TypeError(f"{name} must be {wanted}, got {i!r}.")

    def to_timestring(self) -> str:
        """Return the time as a string for :meth:`from_timestring`."""
        return f"{self.value}{self.unit.value}"

    def _number(self, other: object) -> int | float | None:
        """Return ``other`` in this time's unit; None if it is not a time."""
        if isinstance(other, (int, float)) and not isinstance(other, bool):
            return other
        if isinstance(other, str):
            other = Time.from_timestring(other)
        if not isinstance(other, Time):
            return None
        if other.unit is not self.unit:
            raise MixedUnitsError(f"{self} and {other} have different units and cannot be compared or combined.")
        return other.value

    def __eq__(self, other: object) -> bool:
        try:
            number = self._number(other)
        except ValueError:  # equality never raises: times of other units, and other strings, are not equal
            return False
        return NotImplemented if number is None else self.value == number

    def __lt__(self, other: object) -> bool:
        number = self._number(other)
        return NotImplemented if number is None else self.value < number

    def __hash__(self) -> int:
        return hash(self.value)

    __add__ = __radd__ = _combining(operator.add)
    __sub__ = _combining(operator.sub)
    __rsub__ = _combining(lambda own, before: before - own)
    __mod__ = _combining(operator.mod)

    def __neg__(self) -> Time:
        return Time(-self.value, self.unit)

    def __mul__(self, factor: object) -> Time:
        if isinstance(factor, str):
            factor = Time.from_timestring(factor)
        if isinstance(factor, Time):
            if TimeUnit.DURATION not in {self.unit, factor.unit}:
                raise MixedUnitsError(f"{self} and {factor} cannot be multiplied: one must be a number or a duration.")
            unit = factor.unit if self.unit is TimeUnit.DURATION else self.unit
            return _cut_off(self.value * factor.value, unit)
        number = self._number(factor)
        return NotImplemented if number is None else _cut_off(self.value * number, self.unit)

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> Time:
        number = self._number(other)
        if number is None:
            return NotImplemented
        if isinstance(other, (Time, str)):
            return Time(self.value / number, TimeUnit.DURATION)
        return _cut_off(self.value / number, self.unit)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __index__(self) -> int:
        if isinstance(self.value, int):
            return self.value
        raise TypeError(f"{self!r} cannot be used as an index: its unit is fractional.")

    def __repr__(self) -> str:
        return f"Time({self.value!r}, TimeUnit.{self.unit.name})"

    def __str__(self) -> str:
        return self.to_timestring()


def _cut_off(value: float, unit: TimeUnit) -> Time:
    """Return a time, truncated to a whole number if the unit requires it."""
    # Rounding first keeps 0.29 of 100 epochs, 28.999999999999996, from being 28.
    return Time(value if unit in _FRACTIONAL else int(round(value, 9)), unit)


def _fitting_value(value: object, unit: TimeUnit) -> int | float:
    """Return the value, as an int if the unit requires it, or raise a TypeError or ValueError."""
    if type(value) is int:
        return value
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    if not isinstance(value, float):
        raise TypeError(f"value must be a number of {unit.plural}, got {value!r}.")
    if not math.isfinite(value):
        raise ValueError(f"value must be a finite number of {unit.plural}, got {value!r}.")
    if unit in _FRACTIONAL:
        return value
    if not value.is_integer():
        raise ValueError(f"value must be a whole number of {unit.plural}, got {value!r}; parts are in batches, '50ba'.")
    return int(value)


def ensure_time(maybe_time: Time | str | int, int_unit: TimeUnit | str) -> Time:
    """Return a :class:`Time` from a time, a string (``"10ep"``), or a whole number of ``int_unit``.

    Example:
        >>> ensure_time(3, "ep"), ensure_time("5ba", "ep")
        (Time(3, TimeUnit.EPOCH), Time(5, TimeUnit.BATCH))
    """
    return Time.from_input(maybe_time, int_unit)


class Counts(NamedTuple):
    """The counters of a :class:`Timestamp` as plain numbers, for code that runs at every step.

    Reading one is ten times as fast as constructing a :class:`Time`. Wall-clock times (``…_wct``) are in microseconds.
    """

    iteration: int
    epoch: int
    batch: int
    sample: int
    token: int
    epoch_in_iteration: int
    token_in_iteration: int
    batch_in_epoch: int
    sample_in_epoch: int
    token_in_epoch: int
    total_wct: int
    iteration_wct: int
    epoch_wct: int
    batch_wct: int


_UNITS_OF_COUNTS = [TimeUnit(name.split("_")[0]) for name in Counts._fields if not name.endswith("_wct")]
_COUNTER_OF_UNIT: Mapping[TimeUnit, Callable[[Counts], int | float]] = {
    **{TimeUnit(name): operator.attrgetter(name) for name in ("iteration", "epoch", "batch", "sample", "token")},
    TimeUnit.SECOND: lambda counts: counts.total_wct / _SECOND,
}
_COUNTER_IN_EPOCH: Mapping[TimeUnit, Callable[[Counts], int | float]] = {
    TimeUnit(name): operator.attrgetter(f"{name}_in_epoch") for name in ("batch", "sample", "token")
}
_NEW_EPOCH = dict.fromkeys(("batch_in_epoch", "sample_in_epoch", "token_in_epoch", "epoch_wct", "batch_wct"), 0)
_NEW_ITERATION = dict.fromkeys(("epoch_in_iteration", "token_in_iteration", "iteration_wct"), 0)


def _to_count(value: Time | int, unit: TimeUnit) -> int:
    time = Time.from_input(value, unit)
    if time.unit is not unit or time.value < 0:
        raise ValueError(f"This field of a Timestamp counts {unit.plural} from 0 up, got {value!r}.")
    return int(time.value)


def _to_microseconds(value: dt.timedelta | int | None) -> int:
    if isinstance(value, dt.timedelta):
        return value // _MICROSECOND
    if value is None or type(value) is int:
        return value or 0
    raise TypeError(f"A wall-clock time must be a datetime.timedelta or a whole number of microseconds, got {value!r}.")


def _counter(name: str, doc: str) -> Time:
    """Return a property of a timestamp that makes a time of a counter when it is read."""
    read, unit = operator.attrgetter(f"counts.{name}"), TimeUnit(name.split("_", maxsplit=1)[0])

    def write(timestamp: Timestamp, value: Time | int) -> None:
        object.__setattr__(timestamp, "counts", timestamp.counts._replace(**{name: _to_count(value, unit)}))

    # Programs assign it at the end of an epoch, which ends the iteration.
    may_write = write if name == "epoch_in_iteration" else None
    return cast("Time", property(lambda timestamp: Time(read(timestamp), unit), may_write, doc=doc))


def _duration(name: str, doc: str) -> dt.timedelta:
    """Return a property of a timestamp that makes a duration of a number of microseconds when it is read."""
    read = operator.attrgetter(f"counts.{name}")
    return cast("dt.timedelta", property(lambda timestamp: _MICROSECOND * read(timestamp), doc=doc))


def _comparing(operation: Callable[[Any, Any], bool]) -> Callable[[Timestamp, Time | str], bool]:
    """Return a comparison of a timestamp with a time, in the unit of that."""

    def compared(self: Timestamp, other: Time | str) -> bool:
        if isinstance(other, str):
            other = Time.from_timestring(other)
        return operation(self.count(other.unit), other.value) if isinstance(other, Time) else NotImplemented

    return compared


@attrs.define(order=False, init=False, repr=False, unsafe_hash=True, on_setattr=attrs.setters.frozen)
class Timestamp(StoredAsObject):
    """The progress of a run in every unit. Each step creates a new one; only ``epoch_in_iteration`` can be assigned.

    A time or string is compared with the counter of its unit: ``timestamp >= "10ep"``.

    Args:
        iteration, epoch, batch, sample, token: Completed since the start.
        epoch_in_iteration, token_in_iteration: Completed since the start of the iteration.
        batch_in_epoch, sample_in_epoch, token_in_epoch: Completed since the start of the epoch.
        total_wct, iteration_wct, epoch_wct, batch_wct: Wall-clock time in total, in the iteration, in the epoch and in
            the last batch; a ``timedelta``, or microseconds.

    Raises:
        ValueError: A count is negative, or a time in another unit than its field's.
        TypeError: A wall-clock time is neither a ``timedelta`` nor a whole number.

    Example:
        >>> clock = Timestamp().to_next_batch(samples=32)
        >>> clock.batch, clock.sample, clock >= "1ba"
        (Time(1, TimeUnit.BATCH), Time(32, TimeUnit.SAMPLE), True)
    """

    counts: Counts

    def __init__(
        self,
        iteration: Time | int = 0,
        epoch: Time | int = 0,
        batch: Time | int = 0,
        sample: Time | int = 0,
        token: Time | int = 0,
        epoch_in_iteration: Time | int = 0,
        token_in_iteration: Time | int = 0,
        batch_in_epoch: Time | int = 0,
        sample_in_epoch: Time | int = 0,
        token_in_epoch: Time | int = 0,
        total_wct: dt.timedelta | int | None = None,
        iteration_wct: dt.timedelta | int | None = None,
        epoch_wct: dt.timedelta | int | None = None,
        batch_wct: dt.timedelta | int | None = None,
    ) -> None:
        done = [iteration, epoch, batch, sample, token, epoch_in_iteration, token_in_iteration]
        done += [batch_in_epoch, sample_in_epoch, token_in_epoch]
        spent = (total_wct, iteration_wct, epoch_wct, batch_wct)
        counts = Counts(*map(_to_count, done, _UNITS_OF_COUNTS), *map(_to_microseconds, spent))
        object.__setattr__(self, "counts", counts)

    iteration = _counter("iteration", "Completed iterations.")
    epoch = _counter("epoch", "Completed epochs.")
    batch = _counter("batch", "Completed batches.")
    sample = _counter("sample", "Samples trained on.")
    token = _counter("token", "Tokens trained on.")
    epoch_in_iteration = _counter("epoch_in_iteration", "Epochs completed in this iteration.")
    token_in_iteration = _counter("token_in_iteration", "Tokens trained on in this iteration.")
    batch_in_epoch = _counter("batch_in_epoch", "Batches completed in this epoch.")
    sample_in_epoch = _counter("sample_in_epoch", "Samples trained on in this epoch.")
    token_in_epoch = _counter("token_in_epoch", "Tokens trained on in this epoch.")
    total_wct = _duration("total_wct", "Wall-clock time in total.")
    iteration_wct = _duration("iteration_wct", "Wall-clock time in this iteration.")
    epoch_wct = _duration("epoch_wct", "Wall-clock time in this epoch.")
    batch_wct = _duration("batch_wct", "Wall-clock time of the last batch, of several processes the mean.")

    def __repr__(self) -> str:
        return f"Timestamp({', '.join(f'{name}={value}' for name, value in self.counts._asdict().items())})"

    def get(self, unit: TimeUnit | str) -> Time:
        """Return the counter of ``unit``.

        Raises:
            ValueError: ``unit`` is ``"dur"``: a timestamp has no ``max_duration``.
        """
        return Time(self.count(_to_unit(unit)), unit)

    def count(self, unit: TimeUnit, *, in_epoch: bool = False) -> int | float:
        """Return the result of :meth:`get` as a plain number.

        Args:
            unit: What to count.
            in_epoch: Whether to count since the start of the epoch, in batches, samples or tokens.

        Raises:
            ValueError: A timestamp does not count in this unit.
        """
        try:
            counter = (_COUNTER_IN_EPOCH if in_epoch else _COUNTER_OF_UNIT)[unit]
        except KeyError:
            raise ValueError(
                f"A timestamp does not count in {unit!r}; a duration is a fraction of State.max_duration: "
                "see State.get_elapsed_duration()."
            ) from None
        return counter(self.counts)

    def to_next_batch(
        self, samples: int | Time = 0, tokens: int | Time = 0, duration: dt.timedelta | int | None = 0
    ) -> Timestamp:
        """Return the timestamp after another batch of ``samples`` and ``tokens``, which took ``duration``."""
        samples, tokens = int(samples), int(tokens)
        duration = duration if type(duration) is int else _to_microseconds(duration)
        # Runs in each step: this takes a third of the time of _replace.
        iteration, epoch, batch, sample, token, epoch_i, token_i, batch_e, sample_e, token_e, total, wct_i, wct_e, _ = (
            self.counts
        )
        later = (
            iteration, epoch, batch + 1, sample + samples, token + tokens, epoch_i, token_i + tokens, batch_e + 1,
            sample_e + samples, token_e + tokens, total + duration, wct_i + duration, wct_e + duration, duration,
        )  # fmt: skip
        clock = object.__new__(Timestamp)
        object.__setattr__(clock, "counts", tuple.__new__(Counts, later))
        return clock

    def to_next_epoch(self, duration: dt.timedelta | int | None = None) -> Timestamp:
        """Return the timestamp after the end of the epoch, which took ``duration`` in addition to its batches."""
        duration, now = _to_microseconds(duration), self.counts
        later = now._replace(
            epoch=now.epoch + 1,
            epoch_in_iteration=now.epoch_in_iteration + 1,
            total_wct=now.total_wct + duration,
            iteration_wct=now.iteration_wct + duration,
            **_NEW_EPOCH,
        )
        return Timestamp.of(later)

    def to_next_iteration(self, duration: dt.timedelta | int | None = None) -> Timestamp:
        """Return the timestamp after the end of the iteration, which took ``duration`` in addition to its epochs."""
        now = self.counts
        later = now._replace(
            iteration=now.iteration + 1,
            total_wct=now.total_wct + _to_microseconds(duration),
            **_NEW_EPOCH,
            **_NEW_ITERATION,
        )
        return Timestamp.of(later)

    def copy(self, **changes: Any) -> Timestamp:
        """Return a timestamp with changed fields, by the names of the constructor's arguments."""
        given = {name: value for name, value in changes.items() if value is not None}
        return type(self)(**self.counts._asdict() | given)

    __lt__ = _comparing(operator.lt)
    __le__ = _comparing(operator.le)
    __gt__ = _comparing(operator.gt)
    __ge__ = _comparing(operator.ge)

    @classmethod
    def of(cls, counts: Counts) -> Timestamp:
        """Return the timestamp of these counters, which are not checked."""
        clock = object.__new__(cls)
        object.__setattr__(clock, "counts", counts)
        return clock

    def state_dict(self) -> dict[str, int | float]:
        """Return the counts and the seconds by the names of the constructor's arguments."""
        return {
            name: value / _SECOND if name.endswith("_wct") else value for name, value in self.counts._asdict().items()
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, int | float]) -> Timestamp:
        """Return the timestamp from the result of :meth:`state_dict`.

        Raises:
            ValueError: A name is missing or unknown, or a value is no count or no number of seconds.

        Example:
            >>> Timestamp.from_state_dict(Timestamp(batch=3).state_dict()).batch
            Time(3, TimeUnit.BATCH)
        """
        expected, state = set(Counts._fields), dict(state)
        former = state.pop("Timestamp", state)  # in State.state_dict
        if set(state) != expected or former != state:
            raise ValueError(
                f"A saved Timestamp must have exactly the fields {sorted(expected)}, and the same under 'Timestamp'; "
                f"missing: {sorted(expected - set(state))}, unknown: {sorted(set(state) - expected)}."
            )
        try:
            counts: dict[str, Any] = {
                name: dt.timedelta(seconds=value) if name.endswith("_wct") else value for name, value in state.items()
            }
            return cls(**counts)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"A saved Timestamp must have counts and seconds, got {dict(state)}: {error}") from None

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Replace all counts in place; only for programs for MosaicML Composer. Others use :meth:`from_state_dict`.

        So code that uses a timestamp in another thread, such as that which writes a checkpoint, takes a :meth:`copy`.
        """
        object.__setattr__(self, "counts", Timestamp.from_state_dict(state).counts)

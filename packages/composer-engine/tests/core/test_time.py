"""Times and timestamps."""

import datetime as dt
import json
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer.core import Time, Timestamp, TimeUnit, ensure_time

WHOLE_UNITS = [TimeUnit.ITERATION, TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN]
counts = st.integers(0, 10**15)
whole_units = st.sampled_from(WHOLE_UNITS)
times = st.one_of(
    st.builds(Time, st.integers(-(10**12), 10**12), whole_units),
    st.builds(Time, st.floats(-1e9, 1e9), st.sampled_from([TimeUnit.DURATION, TimeUnit.SECOND])),
)
wall_clocks = st.timedeltas(dt.timedelta(), dt.timedelta(days=10_000))
timestamps = st.builds(
    Timestamp,
    *[counts] * 10,
    total_wct=wall_clocks,
    iteration_wct=wall_clocks,
    epoch_wct=wall_clocks,
    batch_wct=wall_clocks,
)


class TestTimeUnit:
    @pytest.mark.parametrize("unit", TimeUnit)
    def test_lookup_by_value_name_and_plural(self, unit):
        """A unit is found by its short value, name and plural, in any case."""
        words = [unit.value, unit.name, unit.name.lower(), unit.plural, unit.plural.title(), f" {unit.plural} "]

        assert {TimeUnit(word) for word in words} == {unit}


class TestConstruction:
    @pytest.mark.parametrize(
        ("method", "unit"),
        [
            ("from_iteration", "iter"),
            ("from_epoch", "ep"),
            ("from_batch", "ba"),
            ("from_sample", "sp"),
            ("from_token", "tok"),
            ("from_duration", "dur"),
        ],
    )
    def test_named_constructors(self, method, unit):
        """Each unit has a constructor of its name."""
        assert getattr(Time, method)(3) == Time(3, unit)

    @pytest.mark.parametrize(
        ("text", "time"),
        [
            ("10ep", Time(10, "ep")),
            ("10 epochs", Time(10, "ep")),
            (" 1_000ba ", Time(1000, "ba")),
            ("1e6tok", Time(1_000_000, "tok")),
            ("2.0EP", Time(2, "ep")),
            ("0.7dur", Time(0.7, "dur")),
            (".5dur", Time(0.5, "dur")),
            ("-1sp", Time(-1, "sp")),
            ("90sec", Time(90, "sec")),
            ("30min", Time(1800, "sec")),
            (" 1h 30m ", Time(5400, "sec")),
            ("1.5s", Time(1.5, "sec")),
            ("2d", Time(172_800, "sec")),
            ("2iter", Time(2, "iter")),
        ],
    )
    def test_from_timestring(self, text, time):
        """A number and a unit, with or without a space between them, or days, hours, minutes and seconds."""
        parsed = Time.from_timestring(text)

        assert (parsed.value, parsed.unit) == (time.value, time.unit)

    @pytest.mark.parametrize("text", ["", "ep", "10", "10 10ep", "20m 1h", "ten ep", " "])
    def test_from_timestring_raises(self, text):
        """The error states what was expected, the value and the units."""
        with pytest.raises(ValueError, match=r"must be a number followed by a unit, such as '10ep'.*'ba' \(batch\)"):
            Time.from_timestring(text)

    def test_part_of_an_epoch(self):
        """The error names the unit of a part of an epoch."""
        with pytest.raises(ValueError, match=r"^eval_interval: .* got 0\.5; parts are in batches, '50ba'"):
            Time.from_timestring("0.5ep", name="eval_interval")

    @pytest.mark.parametrize(
        ("value", "seconds"),
        [
            ("1h20m40s", 4840),
            ("90s", 90),
            ("2d 3h", 183_600),
            ("0.5s", 0.5),
            (dt.timedelta(minutes=2), 120),
            (dt.timedelta(milliseconds=1500), 1.5),
        ],
    )
    def test_from_timedelta(self, value, seconds):
        """Hours, minutes and seconds, or a timedelta."""
        assert Time.from_timedelta(value) == Time(seconds, "sec")

    @pytest.mark.parametrize("value", [Time(3, "ep"), "3ep", 3, torch.tensor(3)])
    def test_from_input_and_ensure_time(self, value):
        """A Time, a string, or a number where a unit is given."""
        assert Time.from_input(value, "ep") == ensure_time(value, "epoch") == Time(3, "ep")

    @pytest.mark.parametrize("value", ["soon", "1.5ep", "1eps", 1.5, None])
    def test_from_input_names_the_parameter(self, value):
        """Errors begin with the parameter's name."""
        with pytest.raises((TypeError, ValueError), match=r"^max_duration"):
            Time.from_input(value, "ep", name="max_duration")

    @given(times)
    def test_repr_is_code(self, time):
        """The text of a time creates an equal one."""
        again = eval(repr(time), {"Time": Time, "TimeUnit": TimeUnit})

        assert (again, type(again.value)) == (time, type(time.value))

    @given(times)
    def test_string_round_trip(self, time):
        """The string of a time creates an equal one, with value and unit."""
        again = Time.from_timestring(time.to_timestring())

        assert (again.value, again.unit) == (time.value, time.unit)

    @given(times)
    def test_pickle_round_trip(self, time):
        """A time survives being sent to another process."""
        assert pickle.loads(pickle.dumps(time)) == time


class TestEqualityAndHash:
    @given(times, times)
    def test_equal_times_have_equal_hashes(self, one, other):
        """Equal times have one hash, so that times can be keys."""
        assert one != other or hash(one) == hash(other)

    @given(times)
    def test_equals_number_and_string(self, time):
        """A number is compared in the time's unit, a string as a time; the number's hash is equal."""
        assert time == time.value == time
        assert time == str(time)
        assert hash(time) == hash(time.value)

    @pytest.mark.parametrize("other", [Time(1, "ba"), "1ba", "2ep", "nonsense", None, [1], 2])
    def test_is_unequal_to_other_types(self, other):
        """Equality with another unit or type is False and never raises."""
        assert (Time(1, "ep") == other) is False
        assert Time(1, "ep") != other


class TestOrder:
    @given(st.integers(), st.integers(), whole_units)
    def test_order_matches_numbers(self, one, other, unit):
        """Times of one unit compare like their numbers, in any form of the other side."""
        time = Time(one, unit)

        for same in (Time(other, unit), other, f"{other}{unit.value}"):
            assert (time < same, time <= same, time > same, time >= same) == (
                one < other,
                one <= other,
                one > other,
                one >= other,
            )

    @pytest.mark.parametrize("other", [Time(1, "ba"), "1ba"])
    def test_different_units_raise(self, other):
        """Epochs and batches are not ordered."""
        with pytest.raises(ValueError, match=r"1ep and 1ba have different units") as caught:
            _ = Time(1, "ep") < other

        assert isinstance(caught.value, RuntimeError)  # as in MosaicML Composer


class TestArithmetic:
    @given(st.integers(), st.integers(), whole_units)
    def test_sum_and_difference(self, one, other, unit):
        """Times of one unit are added and subtracted like numbers; the second may be a number or string."""
        for same in (Time(other, unit), other, f"{other}{unit.value}"):
            assert Time(one, unit) + same == Time(one + other, unit)
            assert same + Time(one, unit) == Time(one + other, unit)
            assert Time(one, unit) - same == Time(one - other, unit)
            assert same - Time(one, unit) == Time(other - one, unit)

    @given(times)
    def test_difference_undoes_the_sum(self, time):
        """Subtraction is the inverse of addition, and zero is neutral."""
        assert time + 0 == time
        assert time - time == 0

    @given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), whole_units)
    def test_whole_multiples(self, value, factor, unit):
        """A number beside a time multiplies it."""
        assert Time(value, unit) * factor == factor * Time(value, unit) == Time(value * factor, unit)

    @given(st.integers(0, 100), st.integers(1, 10**4))
    def test_percentages_are_exact(self, percent, whole):
        """0.29 of 100 epochs is 29, although 0.29 * 100 is slightly less in floating point."""
        assert Time(100 * whole, "ep") * (percent / 100) == Time(percent * whole, "ep")

    @pytest.mark.parametrize("half", [Time(0.5, "dur"), "0.5dur", 0.5])
    def test_fraction_of_a_time_in_either_order(self, half):
        """A time multiplied by a duration has the time's unit."""
        assert Time(10, "ep") * half == half * Time(10, "ep") == Time(5, "ep")

    @given(st.integers(-(10**9), 10**9), st.integers(1, 10**9), whole_units)
    def test_quotient_of_two_times_is_a_duration(self, value, whole, unit):
        """The quotient of two times is a fraction."""
        assert Time(value, unit) / Time(whole, unit) == Time(value / whole, "dur")

    def test_quotient_with_a_number_keeps_the_unit(self):
        """A third of ten epochs is three."""
        assert (Time(10, "ep") / 3, Time(1, "sec") / 4) == (Time(3, "ep"), Time(0.25, "sec"))

    @given(times)
    def test_negative(self, time):
        """The negative of a time is what it takes to reach 0."""
        assert time + -time == 0
        assert (-time).unit is time.unit

    @given(st.integers(0, 10**9), st.integers(1, 10**9))
    def test_remainder(self, value, every):
        """``timestamp.batch % 10 == 0`` is every tenth batch."""
        assert Time(value, "ba") % every == Time(value % every, "ba")

    @pytest.mark.parametrize("operation", ["+", "-", "*", "/", "%", "<"])
    def test_invalid_operands_are_type_errors(self, operation):
        """None as an operand is a TypeError."""
        with pytest.raises(TypeError, match=r"not supported between|unsupported operand"):
            eval(f"one {operation} None", {"one": Time(1, "ep")})

    def test_conversions(self):
        """A time converts to a number, and to an index if its unit is integral."""
        assert (int(Time(3, "ba")), float(Time(0.5, "dur")), [*range(5)][Time(3, "ba")]) == (3, 0.5, 3)


class TestTimestamp:
    @given(timestamps, counts, counts, wall_clocks)
    def test_to_next_batch(self, clock, samples, tokens, duration):
        """A batch advances batches, samples, tokens and time, in all enclosing units."""
        later = clock.to_next_batch(samples, tokens, duration)

        assert later == clock.copy(
            batch=clock.batch + 1,
            batch_in_epoch=clock.batch_in_epoch + 1,
            sample=clock.sample + samples,
            sample_in_epoch=clock.sample_in_epoch + samples,
            token=clock.token + tokens,
            token_in_epoch=clock.token_in_epoch + tokens,
            token_in_iteration=clock.token_in_iteration + tokens,
            total_wct=clock.total_wct + duration,
            iteration_wct=clock.iteration_wct + duration,
            epoch_wct=clock.epoch_wct + duration,
            batch_wct=duration,
        )

    @given(timestamps, wall_clocks)
    def test_to_next_epoch(self, clock, duration):
        """An epoch is counted, and counts within the epoch are reset."""
        later = clock.to_next_epoch(duration)

        assert later == clock.copy(
            epoch=clock.epoch + 1,
            epoch_in_iteration=clock.epoch_in_iteration + 1,
            batch_in_epoch=0,
            sample_in_epoch=0,
            token_in_epoch=0,
            total_wct=clock.total_wct + duration,
            iteration_wct=clock.iteration_wct + duration,
            epoch_wct=dt.timedelta(),
            batch_wct=dt.timedelta(),
        )

    @given(timestamps, wall_clocks)
    def test_to_next_iteration(self, clock, duration):
        """An iteration is counted, and counts within it are reset."""
        later = clock.to_next_iteration(duration)

        assert later == Timestamp(
            iteration=clock.iteration + 1,
            epoch=clock.epoch,
            batch=clock.batch,
            sample=clock.sample,
            token=clock.token,
            total_wct=clock.total_wct + duration,
        )

    @given(timestamps)
    def test_state_dict_round_trip_through_json(self, clock):
        """The clock is restored exactly, to the microsecond."""
        saved = json.loads(json.dumps(clock.state_dict()))

        assert Timestamp.from_state_dict(saved) == clock

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"batch": 1.5}, "must be a Time or a string such as '10ep', or a whole number of batches, got 1.5"),
            ({"batch": True}, "or a whole number of batches, got True"),
            ({"epoch": "3"}, "must be a number followed by a unit, such as '10ep'; got '3'"),
            ({"sample": -1}, "counts samples from 0 up, got -1"),
            ({"total_wct": None}, "A saved Timestamp must have counts and seconds"),
            ({"total_wct": float("nan")}, "A saved Timestamp must have counts and seconds"),
            ({"batch_wct": 1e300}, "A saved Timestamp must have counts and seconds"),
        ],
    )
    def test_from_state_dict_with_non_numbers_raises(self, change, text):
        """An invalid count is reported."""
        with pytest.raises(ValueError, match=text):
            Timestamp.from_state_dict(Timestamp().state_dict() | change)

    @pytest.mark.parametrize("unit", WHOLE_UNITS)
    def test_get(self, unit):
        """Each unit has its count."""
        clock = Timestamp(iteration=1, epoch=2, batch=3, sample=4, token=5)

        assert clock.get(unit) == Time(1 + WHOLE_UNITS.index(unit), unit)
        assert clock.get(unit.value).unit is unit
        assert clock.count(unit) == 1 + WHOLE_UNITS.index(unit)

    def test_compares_in_the_unit_of_the_other(self):
        """A string or a time determines the unit of comparison."""
        clock = Timestamp(epoch=2, batch=30)

        assert clock >= "2ep"
        assert clock <= Time(30, "ba")
        assert clock < "31ba"
        assert clock > "1ep"
        assert not clock > "2ep"

    def test_counts_are_times(self):
        """Every count can be read with its unit."""
        clock = Timestamp(epoch_in_iteration=1, token_in_iteration=2, batch_in_epoch=3, sample_in_epoch=4)

        assert repr(
            [clock.epoch_in_iteration, clock.token_in_iteration, clock.batch_in_epoch, clock.sample_in_epoch]
        ) == ("[Time(1, TimeUnit.EPOCH), Time(2, TimeUnit.TOKEN), Time(3, TimeUnit.BATCH), Time(4, TimeUnit.SAMPLE)]")

    @given(timestamps)
    def test_pickle_round_trip(self, clock):
        """A clock survives being sent to another process."""
        assert pickle.loads(pickle.dumps(clock)) == clock

"""Texts that threads of several processes exchange."""

import pytest

from composer.distributed import exchange


class Clock:
    """A clock that only sleeping moves; at a given time a call is made."""

    def __init__(self, seconds, call):
        self.now, self.seconds, self.call = 0.0, seconds, call

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if self.now >= self.seconds:
            self.call()


class TestTake:
    @pytest.mark.parametrize("seconds", [0.01, 0.3, 2.0, 100.0])
    def test_pauses_are_short(self, monkeypatch, seconds):
        """A string is taken at most a tenth of its waiting time late, and never more than a quarter of a second."""
        texts = exchange.Exchange()
        clock = Clock(seconds, lambda: texts.put("key", "text"))
        monkeypatch.setattr(exchange, "time", clock)

        found = texts.take("key", until=1000.0)

        assert found == "text"
        assert clock.now - seconds <= min(0.1 * seconds, 0.25) + 0.001

    def test_time_is_limited(self, monkeypatch):
        """Without a string, it waits until the given time."""
        clock = Clock(1000.0, None)
        monkeypatch.setattr(exchange, "time", clock)

        found = exchange.Exchange().take("key", until=3.0)

        assert found is None
        assert 3.0 <= clock.now <= 3.25

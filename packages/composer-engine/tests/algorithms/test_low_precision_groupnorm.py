"""LowPrecisionGroupNorm: group norms in the precision of the run."""

import pytest

from composer import functional as cf
from composer.algorithms import LowPrecisionGroupNorm
from composer.core import Event
from fixtures.surgery import Surgery


class TestLowPrecisionGroupNorm(Surgery):
    make = LowPrecisionGroupNorm
    inserted = cf.LowPrecisionGroupNorm
    is_required_on_load = False

    def test_event_is_configurable(self):
        """It runs at the configured event; unsupported events raise."""
        assert set(LowPrecisionGroupNorm(apply_at="init").runs_at_events()) == {Event.INIT}
        for event in ("fit_start", "after_lod", None):
            with pytest.raises(ValueError, match=rf"apply_at must be Event.INIT or Event.AFTER_LOAD, got {event!r}"):
                LowPrecisionGroupNorm(apply_at=event)

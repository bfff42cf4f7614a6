"""LowPrecisionLayerNorm: layer norms in the precision of the run."""

import pytest
import torch

from composer import functional as cf
from composer.algorithms import LowPrecisionLayerNorm
from composer.core import Event
from fixtures.surgery import Surgery, convolutions, start


class TestLowPrecisionLayerNorm(Surgery):
    make = LowPrecisionLayerNorm
    inserted = cf.LowPrecisionLayerNorm
    is_required_on_load = False

    def test_event_is_configurable(self):
        """It runs at the configured event; unsupported events raise."""
        assert set(LowPrecisionLayerNorm(apply_at="init").runs_at_events()) == {Event.INIT}
        for event in ("fit_start", "after_lod", None):
            with pytest.raises(ValueError, match=rf"apply_at must be Event.INIT or Event.AFTER_LOAD, got {event!r}"):
                LowPrecisionLayerNorm(apply_at=event)

    def test_norms_compute_in_the_runs_precision(self):
        """Under amp_bf16 the norm's output is bfloat16, also on the CPU, where autocast would use float32."""
        engine = start(convolutions(), LowPrecisionLayerNorm(), precision="amp_bf16")
        norm = next(each for each in engine.state.model.modules() if isinstance(each, cf.LowPrecisionLayerNorm))

        with torch.autocast("cpu", torch.bfloat16):
            assert norm(torch.rand(2, 32)).dtype is torch.bfloat16

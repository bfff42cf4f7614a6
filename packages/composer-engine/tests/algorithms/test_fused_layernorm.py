"""FusedLayerNorm: norms that are written as single operations become one layer."""

import pytest
from torch import nn

from composer.algorithms import FusedLayerNorm, LowPrecisionLayerNorm
from composer.core import AlgorithmConflictError, explain
from fixtures.models import WithLoss, WrittenOutNorm
from fixtures.surgery import Surgery


class TestFusedLayerNorm(Surgery):
    make = FusedLayerNorm
    inserted = nn.RMSNorm
    is_required_on_load = False

    def make_model(self):
        return WithLoss(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), WrittenOutNorm(8), nn.Linear(8, 3)))

    def test_norm_replacements_conflict(self):
        """FusedLayerNorm and LowPrecisionLayerNorm conflict, as both replace layer norms."""
        with pytest.raises(AlgorithmConflictError, match="LowPrecisionLayerNorm"):
            explain([FusedLayerNorm(), LowPrecisionLayerNorm()])

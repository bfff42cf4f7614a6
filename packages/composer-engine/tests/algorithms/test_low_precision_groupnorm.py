"""LowPrecisionGroupNorm: group norms in the precision of the run."""

from composer import functional as cf
from composer.algorithms import LowPrecisionGroupNorm
from fixtures.surgery import Surgery


class TestLowPrecisionGroupNorm(Surgery):
    make = LowPrecisionGroupNorm
    inserted = cf.LowPrecisionGroupNorm
    is_required_on_load = False

"""GhostBatchNorm: statistics of parts of a batch."""

from composer import functional as cf
from composer.algorithms import GhostBatchNorm
from fixtures.surgery import Surgery


class TestGhostBatchNorm(Surgery):
    inserted = cf.GhostBatchNorm2d
    former_names = {"GhostBatchNorm/num_new_modules": cf.GhostBatchNorm2d}

    def make(self):
        return GhostBatchNorm(2)

"""Metrics that torchmetrics has no equal of. Importing this module imports torchmetrics."""

from composer.metrics.cross_entropy import CrossEntropy

__all__ = ["CrossEntropy"]

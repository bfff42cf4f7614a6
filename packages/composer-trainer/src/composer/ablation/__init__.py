"""Measure on your own training which methods help and what they cost."""

from composer.ablation.experiment import ablate
from composer.ablation.study import Study

__all__ = ["Study", "ablate"]

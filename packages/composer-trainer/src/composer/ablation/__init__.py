"""Measure on your own training which methods help and what they cost."""

from composer.ablation.experiment import ablate
from composer.ablation.study import Study
from composer.functional.signatures import unquote_annotations

__all__ = ["Study", "ablate"]

unquote_annotations(globals())

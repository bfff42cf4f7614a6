"""Checks and trials of a training before it begins: layers, memory, learning rates, microbatches, exact resumes."""

from composer.diagnostics.exact_resume import check_exact_resume
from composer.diagnostics.layers import summary
from composer.diagnostics.learning_rate import LRSearch, find_lr
from composer.diagnostics.memory import estimate_memory
from composer.diagnostics.microbatches import check_microbatches
from composer.functional.signatures import unquote_annotations

__all__ = ["LRSearch", "check_exact_resume", "check_microbatches", "estimate_memory", "find_lr", "summary"]

unquote_annotations(globals())

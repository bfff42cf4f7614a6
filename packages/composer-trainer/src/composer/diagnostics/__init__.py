"""Checks of a user's own training before it begins: exact resumes, microbatches, memory."""

from composer.diagnostics.exact_resume import check_exact_resume
from composer.diagnostics.memory import estimate_memory
from composer.diagnostics.microbatches import check_microbatches
from composer.functional.signatures import unquote_annotations

__all__ = ["check_exact_resume", "check_microbatches", "estimate_memory"]

unquote_annotations(globals())

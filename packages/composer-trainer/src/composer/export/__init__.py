"""Export of models to files that are read without this library, and of weights merged from checkpoints."""

from composer.export.inference import ExportError, export_for_inference
from composer.export.merging import decay_by_merging, merge_checkpoints
from composer.functional.signatures import unquote_annotations

__all__ = ["ExportError", "decay_by_merging", "export_for_inference", "merge_checkpoints"]

unquote_annotations(globals())

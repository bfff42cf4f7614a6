"""Export of models to files that are read without this library."""

from composer.export.inference import ExportError, export_for_inference
from composer.functional.signatures import unquote_annotations

__all__ = ["ExportError", "export_for_inference"]

unquote_annotations(globals())

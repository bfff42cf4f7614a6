"""Export of models to files that are read without this library."""

from composer.export.inference import ExportError, export_for_inference

__all__ = ["ExportError", "export_for_inference"]

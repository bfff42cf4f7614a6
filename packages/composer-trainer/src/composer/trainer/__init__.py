"""The trainer: a loop of one page, and the parts that it calls."""

from composer.functional.former_names import serve_former_names
from composer.functional.signatures import unquote_annotations
from composer.trainer.result import FitResult
from composer.trainer.trainer import Trainer

__all__ = ["FitResult", "Trainer"]

unquote_annotations(globals())
serve_former_names(__name__)

"""The trainer: a loop of one page, and the parts that it calls."""

from composer.trainer.learning_rate import LRSearch
from composer.trainer.result import FitResult
from composer.trainer.summary import ModelSummary
from composer.trainer.trainer import Trainer

__all__ = ["FitResult", "LRSearch", "ModelSummary", "Trainer"]

"""The trainer: a loop of one page, and the parts that it calls."""

from composer.trainer.trainer import Trainer

__all__ = ["Trainer"]

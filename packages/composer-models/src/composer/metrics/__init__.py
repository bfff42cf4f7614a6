"""Metrics that torchmetrics does not have. Importing this module imports torchmetrics."""

from composer.functional.former_names import serve_former_names
from composer.functional.signatures import unquote_annotations
from composer.metrics.binary_f1 import BinaryF1Score
from composer.metrics.cross_entropy import CrossEntropy
from composer.metrics.dice import Dice
from composer.metrics.language import LanguageCrossEntropy, LanguagePerplexity
from composer.metrics.loss_metric import LossMetric
from composer.metrics.map import MAP
from composer.metrics.masked_accuracy import MaskedAccuracy
from composer.metrics.miou import MIoU

__all__ = [
    "MAP",
    "BinaryF1Score",
    "CrossEntropy",
    "Dice",
    "LanguageCrossEntropy",
    "LanguagePerplexity",
    "LossMetric",
    "MIoU",
    "MaskedAccuracy",
]

unquote_annotations(globals())
serve_former_names(__name__)

"""Metrics that torchmetrics does not have. Importing this module imports torchmetrics."""

from composer.functional.former_names import serve_former_names
from composer.functional.signatures import unquote_annotations
from composer.metrics.map import MAP
from composer.metrics.model_loss import ModelLoss
from composer.metrics.overlap import Dice, MIoU
from composer.metrics.scores import (
    BinaryF1Score,
    CrossEntropy,
    LanguageCrossEntropy,
    LanguagePerplexity,
    LossMetric,
    MaskedAccuracy,
)

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
    "ModelLoss",
]

unquote_annotations(globals())
serve_former_names(__name__)

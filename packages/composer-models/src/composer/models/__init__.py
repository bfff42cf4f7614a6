"""Models for a trainer: a forward pass, a loss and metrics, which take the entire batch."""

from composer.functional.former_names import serve_former_names
from composer.functional.signatures import unquote_annotations
from composer.models._huggingface_checkpoint import write_huggingface_pretrained_from_composer_checkpoint
from composer.models.base import ComposerModel
from composer.models.classifier import ComposerClassifier
from composer.models.contrastive import ComposerContrastive
from composer.models.detector import (
    ComposerDetector,
    collate_detection,
    count_detection_samples,
    split_detection_batch,
)
from composer.models.huggingface import HuggingFaceModel
from composer.models.initializers import Initializer
from composer.models.mmdet import MMDetModel
from composer.models.multi_task import ComposerMultiTask
from composer.models.preference import PreferenceModel
from composer.models.regressor import ComposerRegressor
from composer.models.segmenter import ComposerSegmenter
from composer.models.timm import composer_timm
from composer.models.torchvision import composer_torchvision

__all__ = [
    "ComposerClassifier",
    "ComposerContrastive",
    "ComposerDetector",
    "ComposerModel",
    "ComposerMultiTask",
    "ComposerRegressor",
    "ComposerSegmenter",
    "HuggingFaceModel",
    "Initializer",
    "MMDetModel",
    "PreferenceModel",
    "collate_detection",
    "composer_timm",
    "composer_torchvision",
    "count_detection_samples",
    "split_detection_batch",
    "write_huggingface_pretrained_from_composer_checkpoint",
]

unquote_annotations(globals())
serve_former_names(__name__)

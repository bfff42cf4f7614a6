"""Models as a trainer sees them: a forward pass, a loss and metrics, each given the whole batch."""

from composer.models.base import ComposerModel
from composer.models.classifier import ComposerClassifier

__all__ = ["ComposerClassifier", "ComposerModel"]

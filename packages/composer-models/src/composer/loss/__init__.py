"""Losses of logits: the cross entropy, the binary cross entropy of each class, and Dice."""

from composer.functional import soft_cross_entropy
from composer.functional.former_names import serve_former_names
from composer.functional.signatures import unquote_annotations
from composer.loss._calling import loss_registry
from composer.loss.binary_cross_entropy import binary_cross_entropy_with_logits
from composer.loss.dice import DiceLoss

__all__ = ["DiceLoss", "binary_cross_entropy_with_logits", "loss_registry", "soft_cross_entropy"]

unquote_annotations(globals())
serve_former_names(__name__)

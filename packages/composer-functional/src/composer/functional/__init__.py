"""Training speed-ups and regularisers as pure functions on PyTorch tensors and modules.

Kernels take tensors, numbers and an optional ``generator`` and return values; ``apply_*`` edits a module in place and
returns a report of what it did. Import what is listed here, nothing below it::

    from composer import functional as cf

    report = cf.apply_blurpool(model, optimizers=optimizer)
"""

from composer.functional.augmentations.mixup import draw_mixing, mixup, mixup_batch
from composer.functional.layers.blurpool import BlurConv2d, BlurMaxPool2d, BlurPool2d
from composer.functional.losses import (
    check_for_index_targets,
    ensure_targets_one_hot,
    infer_target_type,
    soft_cross_entropy,
)
from composer.functional.random import draw_beta, draw_permutation
from composer.functional.surgery.blurpool import apply_blurpool
from composer.functional.surgery.channels_last import apply_channels_last
from composer.functional.surgery.optimizers import update_params_in_optimizer
from composer.functional.surgery.replace import (
    Replacement,
    ReplacementFunction,
    SurgeryReport,
    count_module_instances,
    replace_module_classes,
)
from composer.functional.training.ema import compute_ema, update_averages
from composer.functional.training.label_smoothing import smooth_labels

__all__ = [
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool2d",
    "Replacement",
    "ReplacementFunction",
    "SurgeryReport",
    "apply_blurpool",
    "apply_channels_last",
    "check_for_index_targets",
    "compute_ema",
    "count_module_instances",
    "draw_beta",
    "draw_mixing",
    "draw_permutation",
    "ensure_targets_one_hot",
    "infer_target_type",
    "mixup",
    "mixup_batch",
    "replace_module_classes",
    "smooth_labels",
    "soft_cross_entropy",
    "update_averages",
    "update_params_in_optimizer",
]

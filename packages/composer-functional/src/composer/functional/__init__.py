"""Training speed-ups and regularisers as pure functions on PyTorch tensors and modules.

Kernels take tensors, numbers and an optional ``generator`` and return values; ``apply_*`` changes a module in place and
returns a report. Only the names that are listed here are public::

    from composer import functional as cf

    report = cf.apply_blurpool(model, optimizers=optimizer)
"""

from typing import TYPE_CHECKING

from composer.functional.augmentations.alternating_flip import AlternatingFlip, alternating_flip_batch
from composer.functional.augmentations.annotations import AugmentedBatch
from composer.functional.augmentations.augmix import (
    AugmentAndMixTransform,
    AugMixDraws,
    augmix,
    augmix_batch,
    augmix_image,
    draw_augmix,
)
from composer.functional.augmentations.colout import ColOutTransform, colout, colout_batch, draw_kept
from composer.functional.augmentations.cutmix import CutMixBatch, cutmix, cutmix_batch, draw_cutmix_box
from composer.functional.augmentations.cutout import cutout_batch, draw_box, draw_holes
from composer.functional.augmentations.mixup import MixUpBatch, draw_mixing, mixup, mixup_batch
from composer.functional.augmentations.pipelines import AugmentationDraws, augment_batch, draw_augmentation
from composer.functional.augmentations.randaugment import (
    RandAugmentDraws,
    RandAugmentTransform,
    draw_randaugment,
    randaugment,
    randaugment_batch,
    randaugment_image,
)
from composer.functional.augmentations.resize import draw_corner, resize_batch
from composer.functional.contrastive import contrastive_loss
from composer.functional.layers.alibi import AlibiBias, alibi_slopes
from composer.functional.layers.blurpool import BlurConv2d, BlurMaxPool2d, BlurPool2d, blur_2d
from composer.functional.layers.chunked_head import ChunkedHead
from composer.functional.layers.factorized import FactorizedConv2d, FactorizedLinear, factorize_conv2d, factorize_matrix
from composer.functional.layers.gated_linear_units import GatedLinearUnit
from composer.functional.layers.ghost_batchnorm import GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d
from composer.functional.layers.gyro_dropout import GyroDropout
from composer.functional.layers.low_precision_norms import LowPrecisionGroupNorm, LowPrecisionLayerNorm
from composer.functional.layers.noisy_embedding import NoisyEmbedding, draw_embedding_noise
from composer.functional.layers.patch_dropout import PatchDropout
from composer.functional.layers.squeeze_excite import SqueezeExcite2d, SqueezeExciteConv2d
from composer.functional.layers.stochastic_depth import ResidualRule, StochasticDepthBlock
from composer.functional.layers.weight_standardization import WeightStandardizer, standardize_weight
from composer.functional.linear_cross_entropy import linear_cross_entropy, softcap
from composer.functional.losses import (
    check_for_index_targets,
    ensure_targets_one_hot,
    infer_target_type,
    soft_cross_entropy,
)
from composer.functional.random import draw_beta, draw_permutation
from composer.functional.signatures import unquote_annotations
from composer.functional.surgery.activation_checkpointing import apply_activation_checkpointing
from composer.functional.surgery.alibi import apply_alibi
from composer.functional.surgery.attention import (
    AttentionLayout,
    apply_gated_attention,
    apply_qk_norm,
    apply_value_residual,
)
from composer.functional.surgery.blurpool import apply_blurpool
from composer.functional.surgery.channels_last import apply_channels_last
from composer.functional.surgery.chunked_head import apply_chunked_cross_entropy
from composer.functional.surgery.depth_stacking import apply_depth_stacking
from composer.functional.surgery.factorize import apply_factorization
from composer.functional.surgery.fused_layernorm import apply_fused_layernorm
from composer.functional.surgery.gated_linear_units import apply_gated_linear_units
from composer.functional.surgery.ghost_batchnorm import apply_ghost_batchnorm
from composer.functional.surgery.gyro_dropout import apply_gyro_dropout
from composer.functional.surgery.low_precision_norms import apply_low_precision_groupnorm, apply_low_precision_layernorm
from composer.functional.surgery.neftune import apply_neftune
from composer.functional.surgery.optimizers import update_params_in_optimizer
from composer.functional.surgery.patch_dropout import apply_patch_dropout
from composer.functional.surgery.replace import (
    Replacement,
    ReplacementFunction,
    SurgeryReport,
    count_module_instances,
    replace_module_classes,
)
from composer.functional.surgery.squeeze_excite import apply_squeeze_excite
from composer.functional.surgery.stochastic_depth import apply_stochastic_depth, set_drop_rates
from composer.functional.surgery.weight_standardization import apply_weight_standardization
from composer.functional.training.batches import count_documents, count_real_tokens, split_documents, split_image_batch
from composer.functional.training.chat import collate_pairs, tokenize_chat
from composer.functional.training.diloco import compute_outer_step
from composer.functional.training.distillation import distillation_loss
from composer.functional.training.ema import compute_ema, update_averages
from composer.functional.training.gradient_clipping import apply_gradient_clipping
from composer.functional.training.gradient_noise import estimate_gradient_noise
from composer.functional.training.infobatch import draw_infobatch_weights
from composer.functional.training.label_smoothing import smooth_labels
from composer.functional.training.layer_freezing import count_layers_to_freeze, freeze_layers, unfreeze_layers
from composer.functional.training.orthogonalization import orthogonalize
from composer.functional.training.packing import (
    add_document_mask,
    check_packing,
    collate_packed,
    pack_documents,
    pack_lengths,
)
from composer.functional.training.parameter_groups import parameter_groups
from composer.functional.training.post_hoc_ema import post_hoc_weights, power_ema_smoothing
from composer.functional.training.sam import SAMOptimizer
from composer.functional.training.selective_backprop import select_using_loss, should_selective_backprop, take_samples
from composer.functional.training.sequence_length import set_batch_sequence_length
from composer.functional.training.spikes import detect_spikes
from composer.functional.training.swa import compute_swa
from composer.functional.training.token_selection import select_tokens
from composer.functional.training.width_groups import activation_changes, width_groups

__all__ = [
    "AlibiBias",
    "AlternatingFlip",
    "AttentionLayout",
    "AugMixDraws",
    "AugmentAndMixTransform",
    "AugmentationDraws",
    "AugmentedBatch",
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool2d",
    "ChunkedHead",
    "ColOutTransform",
    "CutMixBatch",
    "FactorizedConv2d",
    "FactorizedLinear",
    "GatedLinearUnit",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GhostBatchNorm3d",
    "GyroDropout",
    "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm",
    "MixUpBatch",
    "NoisyEmbedding",
    "PatchDropout",
    "RandAugmentDraws",
    "RandAugmentTransform",
    "Replacement",
    "ReplacementFunction",
    "ResidualRule",
    "SAMOptimizer",
    "SqueezeExcite2d",
    "SqueezeExciteConv2d",
    "StochasticDepthBlock",
    "SurgeryReport",
    "WeightStandardizer",
    "activation_changes",
    "add_document_mask",
    "alibi_slopes",
    "alternating_flip_batch",
    "apply_activation_checkpointing",
    "apply_alibi",
    "apply_blurpool",
    "apply_channels_last",
    "apply_chunked_cross_entropy",
    "apply_depth_stacking",
    "apply_factorization",
    "apply_fused_layernorm",
    "apply_gated_attention",
    "apply_gated_linear_units",
    "apply_ghost_batchnorm",
    "apply_gradient_clipping",
    "apply_gyro_dropout",
    "apply_low_precision_groupnorm",
    "apply_low_precision_layernorm",
    "apply_neftune",
    "apply_patch_dropout",
    "apply_qk_norm",
    "apply_squeeze_excite",
    "apply_stochastic_depth",
    "apply_value_residual",
    "apply_weight_standardization",
    "augment_batch",
    "augmix",
    "augmix_batch",
    "augmix_image",
    "blur_2d",
    "check_for_index_targets",
    "check_packing",
    "collate_packed",
    "collate_pairs",
    "colout",
    "colout_batch",
    "compute_ema",
    "compute_outer_step",
    "compute_swa",
    "contrastive_loss",
    "count_documents",
    "count_layers_to_freeze",
    "count_module_instances",
    "count_real_tokens",
    "cutmix",
    "cutmix_batch",
    "cutout_batch",
    "detect_spikes",
    "distillation_loss",
    "draw_augmentation",
    "draw_augmix",
    "draw_beta",
    "draw_box",
    "draw_corner",
    "draw_cutmix_box",
    "draw_embedding_noise",
    "draw_holes",
    "draw_infobatch_weights",
    "draw_kept",
    "draw_mixing",
    "draw_permutation",
    "draw_randaugment",
    "ensure_targets_one_hot",
    "estimate_gradient_noise",
    "factorize_conv2d",
    "factorize_matrix",
    "freeze_layers",
    "infer_target_type",
    "linear_cross_entropy",
    "mixup",
    "mixup_batch",
    "orthogonalize",
    "pack_documents",
    "pack_lengths",
    "parameter_groups",
    "post_hoc_weights",
    "power_ema_smoothing",
    "randaugment",
    "randaugment_batch",
    "randaugment_image",
    "replace_module_classes",
    "resize_batch",
    "select_tokens",
    "select_using_loss",
    "set_batch_sequence_length",
    "set_drop_rates",
    "should_selective_backprop",
    "smooth_labels",
    "soft_cross_entropy",
    "softcap",
    "split_documents",
    "split_image_batch",
    "standardize_weight",
    "take_samples",
    "tokenize_chat",
    "unfreeze_layers",
    "update_averages",
    "update_params_in_optimizer",
    "width_groups",
]

unquote_annotations(globals())

_OTHER_NAMES = {
    "ema": "compute_ema",
    "swa": "compute_swa",
    "label_smoothing": "smooth_labels",
    "layer_freezing": "freeze_layers",
    "selective_backprop": "select_using_loss",
    "token_selection": "select_tokens",
    "progressive_resizing": "resize_batch",
    "seq_length_warmup": "set_batch_sequence_length",
    "sam": "SAMOptimizer",
    "clip_grad_norm_": "apply_gradient_clipping",
    "clip_grad_value_": "apply_gradient_clipping",
    "clip_gradients": "apply_gradient_clipping",
    "adaptive_clip_grad": "apply_gradient_clipping",
    "one_hot": "ensure_targets_one_hot",
}
"""Names that other libraries, or their users, use for functions of this package."""


if not TYPE_CHECKING:  # otherwise type checkers would accept every name

    def __getattr__(name: str) -> object:
        """Raise an AttributeError that suggests a public name."""
        import difflib  # noqa: PLC0415  (only a wrong name needs it)

        stem = name.lower().removeprefix("apply_")
        other = f"{stem}_batch" if f"{stem}_batch" in __all__ else _OTHER_NAMES.get(stem)
        close = [other] if other is not None else difflib.get_close_matches(name, __all__, n=1, cutoff=0.7)
        hint = f". Did you mean {close[0]!r}?" if close else ". See composer.functional.__all__ for what there is."
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=None)

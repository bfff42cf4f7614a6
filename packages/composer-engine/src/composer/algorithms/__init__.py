"""Algorithms: each defines at which events of the training a kernel of :mod:`composer.functional` runs."""

from composer.algorithms.activation_checkpointing import ActivationCheckpointing
from composer.algorithms.alibi import Alibi
from composer.algorithms.augment import Augment
from composer.algorithms.augmix import AugMix
from composer.algorithms.blurpool import BlurPool
from composer.algorithms.channels_last import ChannelsLast
from composer.algorithms.chunked_cross_entropy import ChunkedCrossEntropy
from composer.algorithms.colout import ColOut
from composer.algorithms.cutmix import CutMix
from composer.algorithms.cutout import CutOut
from composer.algorithms.depth_stacking import DepthStacking
from composer.algorithms.diloco import DiLoCo
from composer.algorithms.distillation import Distillation
from composer.algorithms.ema import EMA
from composer.algorithms.factorize import Factorize
from composer.algorithms.fused_layernorm import FusedLayerNorm
from composer.algorithms.gated_attention import GatedAttention
from composer.algorithms.gated_linear_units import GatedLinearUnits
from composer.algorithms.ghost_batchnorm import GhostBatchNorm
from composer.algorithms.gradient_clipping import GradientClipping
from composer.algorithms.gyro_dropout import GyroDropout
from composer.algorithms.infobatch import InfoBatch, InfoBatchDataset
from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.layer_freezing import LayerFreezing
from composer.algorithms.low_precision_groupnorm import LowPrecisionGroupNorm
from composer.algorithms.low_precision_layernorm import LowPrecisionLayerNorm
from composer.algorithms.mixup import MixUp
from composer.algorithms.neftune import NEFTune
from composer.algorithms.noop_model import NoOpModel
from composer.algorithms.patch_dropout import PatchDropout
from composer.algorithms.post_hoc import PostHocEMA, post_hoc_ema
from composer.algorithms.progressive_resizing import ProgressiveResizing
from composer.algorithms.qk_norm import QKNorm
from composer.algorithms.randaugment import RandAugment
from composer.algorithms.sam import SAM
from composer.algorithms.selective_backprop import SelectiveBackprop
from composer.algorithms.seq_length_warmup import SeqLengthWarmup
from composer.algorithms.skip_spikes import SkipSpikes
from composer.algorithms.squeeze_excite import SqueezeExcite
from composer.algorithms.stochastic_depth import StochasticDepth
from composer.algorithms.swa import SWA
from composer.algorithms.token_selection import TokenSelection, with_reference_losses
from composer.algorithms.value_residual import ValueResidual
from composer.algorithms.weight_standardization import WeightStandardization
from composer.functional import (
    AugmentAndMixTransform,
    ColOutTransform,
    RandAugmentTransform,
    SqueezeExcite2d,
    SqueezeExciteConv2d,
)
from composer.functional.former_names import serve_former_names
from composer.functional.signatures import unquote_annotations

__all__ = [
    "EMA",
    "SAM",
    "SWA",
    "ActivationCheckpointing",
    "Alibi",
    "AugMix",
    "Augment",
    "AugmentAndMixTransform",
    "BlurPool",
    "ChannelsLast",
    "ChunkedCrossEntropy",
    "ColOut",
    "ColOutTransform",
    "CutMix",
    "CutOut",
    "DepthStacking",
    "DiLoCo",
    "Distillation",
    "Factorize",
    "FusedLayerNorm",
    "GatedAttention",
    "GatedLinearUnits",
    "GhostBatchNorm",
    "GradientClipping",
    "GyroDropout",
    "InfoBatch",
    "InfoBatchDataset",
    "LabelSmoothing",
    "LayerFreezing",
    "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm",
    "MixUp",
    "NEFTune",
    "NoOpModel",
    "PatchDropout",
    "PostHocEMA",
    "ProgressiveResizing",
    "QKNorm",
    "RandAugment",
    "RandAugmentTransform",
    "SelectiveBackprop",
    "SeqLengthWarmup",
    "SkipSpikes",
    "SqueezeExcite",
    "SqueezeExcite2d",
    "SqueezeExciteConv2d",
    "StochasticDepth",
    "TokenSelection",
    "ValueResidual",
    "WeightStandardization",
    "post_hoc_ema",
    "with_reference_losses",
]

unquote_annotations(globals())
serve_former_names(__name__)

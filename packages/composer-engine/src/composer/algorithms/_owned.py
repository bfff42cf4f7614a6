"""What only one algorithm of a run can have to itself, with what to do about a second."""

from __future__ import annotations

from composer.core.conflicts import Owned

__all__ = [
    "BATCH_NORMS",
    "CONVOLUTION_WEIGHTS",
    "DROPOUTS",
    "EVALUATION_WEIGHTS",
    "FACTORIZED_LAYERS",
    "FEED_FORWARD_LAYERS",
    "FROZEN_LAYERS",
    "GROUP_NORMS",
    "IMAGE_SIZE",
    "LAYER_NORMS",
    "MEMORY_FORMAT",
    "MODEL",
    "POSITIONS",
    "RESIDUAL_BLOCKS",
    "SAMPLES",
    "SEQUENCE_LENGTH",
    "SQUEEZE_EXCITE_BLOCKS",
    "STEP",
    "STRIDED_LAYERS",
]

BATCH_NORMS = Owned("the batch norms", remedy="A second one would find none that is left: choose one ghost_batch_size.")
CONVOLUTION_WEIGHTS = Owned(
    "the standardization of weights", remedy="Weights that are standardized already do not change: one is enough."
)
DROPOUTS = Owned("the dropout layers", remedy="A second one would find none that is left: choose one set of settings.")
EVALUATION_WEIGHTS = Owned(
    "the weights used for evaluation",
    remedy="A model is evaluated with one average: that of all the training (EMA) or that of its last part (SWA).",
)
FACTORIZED_LAYERS = Owned(
    "the factorized layers", remedy="A second one would factorize the factors: lower the latent sizes of one instead."
)
FEED_FORWARD_LAYERS = Owned(
    "the feed-forward layers", remedy="A second one would find none that is left: choose one act_fn."
)
FROZEN_LAYERS = Owned(
    "which layers are frozen", remedy="Two schedules would undo each other: choose one freeze_start and freeze_level."
)
GROUP_NORMS = Owned("the group norms", remedy="A second one would find none that is left: one is enough.")
IMAGE_SIZE = Owned("the size of images", remedy="Two would multiply their scales: choose one initial_scale.")
LAYER_NORMS = Owned(
    "the layer norms",
    remedy="A norm is either fused (FusedLayerNorm) or computed in low precision (LowPrecisionLayerNorm).",
)
MEMORY_FORMAT = Owned("the model's memory format", remedy="There is one format for all weights: one is enough.")
MODEL = Owned("the model", remedy="A model that does nothing need not be taken out twice.")
POSITIONS = Owned("the position embeddings", remedy="A second one would find them gone: choose one set of settings.")
RESIDUAL_BLOCKS = Owned(
    "the residual blocks",
    remedy="A second one would find none that is left: give one with all kinds of blocks, target_layer_name=[...].",
)
SAMPLES = Owned("the choice of samples", remedy="A second one would choose among those that are left: choose one keep.")
SEQUENCE_LENGTH = Owned("the length of sequences", remedy="The shorter of two would count: choose one set of settings.")
SQUEEZE_EXCITE_BLOCKS = Owned(
    "the squeeze-and-excite blocks", remedy="A second one would add blocks behind blocks: choose one latent_channels."
)
STEP = Owned("the optimizers' step", remedy="A second one would look twice as far: choose one rho.")
STRIDED_LAYERS = Owned(
    "the strided convolutions and pools", remedy="What is blurred is not blurred again: put the settings into one."
)

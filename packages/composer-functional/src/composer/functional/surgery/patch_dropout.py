"""Patch dropout: train vision transformers on a random part of each image's patches (arXiv:2208.07220)."""

from __future__ import annotations

from typing import Any

from torch import nn

from composer.functional.checks import check_modules
from composer.functional.layers.patch_dropout import PatchDropout
from composer.functional.surgery.architectures import find_instances
from composer.functional.surgery.replace import SurgeryReport, replace_layers

# The modules in which position embeddings are added, the layer that follows, and the number of prefix tokens; None if
# the module has it as an attribute.
_PLACES: tuple[tuple[str, str, str, int | None], ...] = (
    ("timm.models.vision_transformer", "VisionTransformer", "patch_drop", None),
    ("torchvision.models.vision_transformer", "Encoder", "dropout", 1),
    ("transformers.models.vit.modeling_vit", "ViTEmbeddings", "dropout", 1),
    ("transformers.models.deit.modeling_deit", "DeiTEmbeddings", "dropout", 2),
    ("transformers.models.dinov2.modeling_dinov2", "Dinov2Embeddings", "dropout", 1),
)


def apply_patch_dropout(model: nn.Module, p: float = 0.5) -> SurgeryReport:
    """Insert :class:`PatchDropout` in front of the blocks of a vision transformer, in place (arXiv:2208.07220).

    Supported are the vision transformers of timm (``VisionTransformer`` and its subclasses) and torchvision, and ViT,
    DeiT and DINOv2 of Transformers. In other models insert the layer behind the addition of position embeddings. It
    has no parameters and is the identity in evaluation: state dicts and optimizers do not change. A second call
    changes nothing, and neither does a call for a model of timm that drops patches already.

    Args:
        model: The model; **changed in place**.
        p: The fraction of each image's patches that is dropped in training, in ``[0, 1)``.

    Returns:
        A report of the inserted layers; empty if there are none.

    Raises:
        TypeError: ``model`` is not a module, or ``p`` is not a number.
        ValueError: ``p`` is out of range.

    Example:
        >>> from torchvision.models import VisionTransformer
        >>> model = VisionTransformer(32, 8, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16)
        >>> print(apply_patch_dropout(model, p=0.5))
        1 module replaced
          encoder.dropout: Dropout -> Sequential
        >>> model.encoder.dropout
        Sequential(
          (0): Dropout(p=0.0, inplace=False)
          (1): PatchDropout(p=0.5, num_prefix_tokens=1)
        )
    """
    check_modules(model=model)
    PatchDropout(p)  # checks the number before anything is changed
    prefixes = {
        getattr(holder, attribute): _num_prefix_tokens(holder, number)
        for source, name, attribute, number in _PLACES
        for holder in find_instances(model, source, name)
    }

    def insert(layer: nn.Module, _: int) -> nn.Module:
        return nn.Sequential(layer, PatchDropout(p, prefixes[layer]))

    return replace_layers(model, {nn.Dropout: insert, nn.Identity: insert}, prefixes.__contains__)


def _num_prefix_tokens(holder: Any, number: int | None) -> int:
    return holder.num_prefix_tokens if number is None else number

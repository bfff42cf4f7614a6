"""Augment: any augmentation of kornia on the batch."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, ClassVar

import attrs
from torch import Tensor, nn
from torch.distributions import Distribution

from composer import functional as cf
from composer.algorithms._annotations import (
    BOX_FORMAT,
    VISIBLE_FRACTION,
    annotated_images,
    check_keys,
    set_annotated_images,
)
from composer.algorithms._idle import warn_of_no_effect
from composer.core import Algorithm, BatchKey, Event, Logger, Stage, State

_FEW = 100
"""The most elements of a tensor that is described by them, such as weights of random choices."""
_ARGUMENTS = {"_fixed_order": "order"}
"""Private attributes of kornia's modules that hold an argument, and its name. Others change while a module is used."""


def _changes_nothing(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return all(map(_changes_nothing, module))
    return isinstance(module, nn.Identity) or getattr(module, "p", None) == 0


def _in_one_line(module: nn.Module) -> str:
    return " ".join(repr(module).split())


def _described(module: nn.Module) -> str:
    """Return a module's ``repr``, followed by the settings of it and its modules that the ``repr`` does not contain."""
    unprinted = {path or type(each).__name__: _unprinted(each) for path, each in module.named_modules()}
    more = "; ".join(f"{path}: {', '.join(settings)}" for path, settings in unprinted.items() if settings)
    return f"{_in_one_line(module)} with {more}" if more else _in_one_line(module)


def _unprinted(module: nn.Module) -> list[str]:
    inherits = type(module).__repr__ is nn.Module.__repr__  # prints its modules, too, whose names are not its own
    printed = f"{module.extra_repr() if inherits else repr(module)} training="  # the mode is no setting
    attributes = {**vars(module), **dict(module.named_buffers(recurse=False))}
    values = {_ARGUMENTS.get(name, name): _to_data(value) for name, value in attributes.items()}
    return [
        f"{name}={value}"
        for name, value in values.items()
        if value not in (None, {})
        and not name.startswith("_")
        and not name.endswith("_sampler")  # a distribution, created from arguments that the module prints
        and not re.search(rf"\b{name}=", printed)
    ]


def _to_data(value: Any) -> Any:
    """Return a number, a string, or a collection of them, enums as their names; None for anything else."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() <= _FEW else None
    if isinstance(value, Distribution):
        return {name: _to_data(getattr(value, name)) for name in value.arg_constraints}
    if isinstance(value, (list, tuple)):
        items = [_to_data(one) for one in value]
        return None if None in items else items
    if isinstance(value, dict):
        return {_to_data(name): _to_data(one) for name, one in value.items()}
    return value if isinstance(value, (bool, int, float, str)) else None


@attrs.define(eq=False)
class Augment(Algorithm):
    """Apply an augmentation of kornia, or any module, to the images of each batch.

    See :func:`composer.functional.augment_batch`. The draws depend only on the run's seed, the process and the batch,
    so that a resumed run, other microbatches and other numbers of loader workers have the same ones.

    Args:
        augmentation: One of kornia's augmentations, a container or a policy of them, or a module of images.
        input_key: Where the images are in a batch.
        mask_key: Where the masks are, if they are moved with the images.
        boxes_key: Where the boxes are, if they are moved with the images.
        keypoints_key: Where the keypoints are, if they are moved with the images.
        labels_key: Where the labels of boxes are. Those of dropped boxes are removed.
        box_format: The format of the boxes: ``"xyxy"``, ``"xywh"`` or ``"cxcywh"``.
        min_visible: Boxes with a smaller fraction of their area inside the image are dropped, in ``[0, 1]``.

    Raises:
        TypeError: ``augmentation`` is not a module.
        ValueError: ``box_format`` is unknown, ``min_visible`` is out of range, or there are labels without boxes.

    Example:
        >>> import kornia.augmentation as K
        >>> Augment(K.RandomHorizontalFlip(p=0.5)).augmentation.p
        0.5
    """

    augmentation: nn.Module = attrs.field(repr=_in_one_line, metadata={"describe": _described})
    input_key: BatchKey = 0
    mask_key: BatchKey | None = None
    boxes_key: BatchKey | None = None
    keypoints_key: BatchKey | None = None
    labels_key: BatchKey | None = None
    box_format: str = attrs.field(default="xyxy", validator=BOX_FORMAT)
    min_visible: float = attrs.field(default=0.0, validator=VISIBLE_FRACTION)

    runs_at: ClassVar = {Event.AFTER_DATALOADER: Stage.AUGMENT}
    reads: ClassVar = {"batch"}
    writes: ClassVar = {"batch"}

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.augmentation, nn.Module):
            raise TypeError(
                "augmentation must be a module such as kornia.augmentation.RandomAffine(30.0), "
                f"got {self.augmentation!r}."
            )
        check_keys(self)
        if _changes_nothing(self.augmentation):
            warn_of_no_effect(
                f"Augment changes nothing with {_in_one_line(self.augmentation)}: all parts are identities or have the "
                "probability 0. Choose another augmentation, or remove it."
            )

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Augment the images, and their masks, boxes and keypoints."""
        images = annotated_images(self, state)
        batch = images if isinstance(images, cf.AugmentedBatch) else cf.AugmentedBatch(images)
        augmented = cf.augment_batch(
            batch.input,
            self.augmentation,
            masks=batch.masks,
            boxes=batch.boxes,
            keypoints=batch.keypoints,
            labels=batch.labels,
            box_format=self.box_format,  # type: ignore[arg-type]
            min_visible=self.min_visible,
            generator=state.generator(self),
        )
        set_annotated_images(self, state, augmented)

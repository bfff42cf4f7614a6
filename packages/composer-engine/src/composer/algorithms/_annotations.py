"""The images of a batch, and what belongs to them, at the keys of an algorithm."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from composer import functional as cf
from composer.core import Algorithm, State
from composer.core.checks import number_between, one_of

BOX_FORMAT = one_of("xyxy", "xywh", "cxcywh")
VISIBLE_FRACTION = number_between(0, 1, meaning="It is a fraction of a box's area.")
_KEYS = {"masks": "mask_key", "boxes": "boxes_key", "keypoints": "keypoints_key", "labels": "labels_key"}


def annotated_images(algorithm: Algorithm, state: State) -> Any:
    """Return the images at ``input_key``; an ``AugmentedBatch`` if the algorithm has keys of annotations."""
    images: Tensor = state.batch_get_item(algorithm.input_key)  # type: ignore[attr-defined]
    keys = _keys(algorithm)
    more = {name: state.batch_get_item(key) for name, key in keys.items()}
    return cf.AugmentedBatch(images, **more) if more else images


def set_annotated_images(algorithm: Algorithm, state: State, value: Tensor | cf.AugmentedBatch) -> None:
    """Replace the images, and their masks, boxes, keypoints and labels."""
    if isinstance(value, cf.AugmentedBatch):
        for name, key in _keys(algorithm).items():
            state.batch_set_item(key, getattr(value, name))
        value = value.input
    state.batch_set_item(algorithm.input_key, value)  # type: ignore[attr-defined]


def check_keys(algorithm: Algorithm) -> None:
    """Raise an error for labels of boxes without the boxes."""
    keys = _keys(algorithm)
    if "labels" in keys and "boxes" not in keys:
        raise ValueError(
            f"labels_key={keys['labels']!r} needs boxes_key: labels are removed with their boxes. For class labels of "
            "images leave labels_key out."
        )


def _keys(algorithm: Algorithm) -> dict[str, object]:
    fields = _fields(type(algorithm))
    return {name: key for name, field in fields if (key := getattr(algorithm, field)) is not None}


@functools.cache
def _fields(kind: type) -> list[tuple[str, str]]:
    return [(name, field) for name, field in _KEYS.items() if hasattr(kind, field)]

"""Transforms of single images put into the pipeline of a dataset, before it makes tensors of them."""

from __future__ import annotations

import copy
import importlib
import warnings
from typing import TYPE_CHECKING, Any

from composer.core import NoEffectWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from composer.core import Algorithm, State

__all__ = ["add_transform"]

# What makes tensors of images, or numbers that are no colours any more.
_CONVERTERS = frozenset(
    {"ToTensor", "PILToTensor", "ToImage", "ToPureTensor", "ToDtype", "ConvertImageDtype", "Normalize", "RandomErasing"}
)


def add_transform(algorithm: Algorithm, transform: Any, state: State) -> None:
    """Let the training dataset apply ``transform`` to every image, once.

    It is put before what makes a tensor of the image, or at the end of the pipeline. A part of a dataset
    (:class:`torch.utils.data.Subset`) gets a copy of the whole, so that other parts stay as they are.

    Raises:
        TypeError: The dataset has no ``transform`` for its images as torchvision's have.
        ValueError: There is no training data yet, its workers run already, or an evaluation uses the same dataset.
    """
    name = type(algorithm).__name__
    loader: Any = state.train_dataloader
    if loader is None:
        raise ValueError(f"{name} changes the training dataset, and there is none: set State.train_dataloader.")
    dataset = getattr(loader, "dataset", None)
    if getattr(loader, "_iterator", None) is not None and getattr(loader, "persistent_workers", False):
        raise ValueError(
            f"{name} came too late: the data loader's persistent workers run already, with a copy of the dataset. "
            "Hand in a new loader."
        )
    holder, dataset = _unwrap(dataset)
    _check(name, dataset)
    if holder is None:
        _check_not_evaluated(name, dataset, state)
    if any(each is transform for each in _steps(dataset.transform)):
        return  # by an earlier fit
    if any(type(each) is type(transform) for each in _steps(dataset.transform)):
        warnings.warn(
            f"{algorithm!r} changed nothing: the dataset applies a {type(transform).__name__} already. Remove one.",
            NoEffectWarning,
            stacklevel=3,
        )
        return
    if holder is not None:
        dataset = holder.dataset = copy.copy(dataset)
    _set_pipeline(dataset, _with(transform, dataset.transform))


def _unwrap(dataset: Any) -> tuple[Any, Any]:
    """Return the innermost part that holds a dataset, None if the dataset is whole, and the dataset."""
    holder = None
    while not hasattr(dataset, "transform") and hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        holder, dataset = dataset, dataset.dataset
    return holder, dataset


def _check(name: str, dataset: Any) -> None:
    if not hasattr(dataset, "transform"):
        raise TypeError(
            f"{name} can only add itself to a dataset with a `transform` for its images, as torchvision's have, got "
            f"{type(dataset).__name__}. Put it into your own pipeline instead: cf.{name.lower()}()."
        )
    joint = getattr(dataset, "transforms", None)
    if joint is not None and not hasattr(joint, "transform"):
        raise TypeError(
            f"{name} changes images and leaves targets alone, but the dataset transforms both together, by "
            f"{type(joint).__name__}. Put it into that transform, if the targets are class labels: cf.{name.lower()}()."
        )


def _check_not_evaluated(name: str, dataset: Any, state: State) -> None:
    evaluated = [getattr(evaluator.dataloader.dataloader, "dataset", None) for evaluator in state.evaluators]
    if any(_unwrap(each)[1] is dataset for each in evaluated):
        raise ValueError(
            f"{name} would change the images of the evaluation as well: it uses the training's dataset object. "
            "Make a second one, without augmentation, for evaluation."
        )


def _steps(pipeline: Callable[[Any], Any] | None) -> Sequence[Any]:
    """Return the transforms of a pipeline; of a ``Compose``, its parts."""
    if pipeline is None:
        return []
    return list(pipeline.transforms) if hasattr(pipeline, "transforms") else [pipeline]


def _with(transform: Any, pipeline: Any) -> Any:
    """Return a pipeline with ``transform`` in it; the one that was given stays as it is."""
    if pipeline is None:
        return transform
    steps = _steps(pipeline)
    place = next((index for index, step in enumerate(steps) if type(step).__name__ in _CONVERTERS), len(steps))
    changed = [*steps[:place], transform, *steps[place:]]
    if hasattr(pipeline, "transforms"):
        return type(pipeline)(changed)
    return _InOrder(changed)


def _set_pipeline(dataset: Any, pipeline: Any) -> None:
    dataset.transform = pipeline
    if not hasattr(dataset, "transforms"):
        return
    # torchvision keeps the image's transform in two places, and its datasets use the one or the other.
    if dataset.transforms is None:
        pair = importlib.import_module("torchvision.datasets.vision").StandardTransform
        dataset.transforms = pair(pipeline, getattr(dataset, "target_transform", None))
    else:
        dataset.transforms = copy.copy(dataset.transforms)
        dataset.transforms.transform = pipeline


class _InOrder:
    """Applies transforms one after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image

    def __repr__(self) -> str:
        return f"{self.transforms}"

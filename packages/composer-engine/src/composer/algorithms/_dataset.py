"""Augmentations of batches, or of single images by the transform of the training dataset."""

from __future__ import annotations

import copy
import importlib
from abc import abstractmethod

# At run time, too, as attrs looks up what the annotations of a subclass and of its bases mean.
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from composer.algorithms._idle import warn_of_no_effect
from composer.core import Algorithm, Event, FieldsByEvent, Logger, Stage, State
from composer.core.checks import number_between, one_of

AUGMENTATION_SET = one_of("all", "safe", "original")
SEVERITY = number_between(0, 10, meaning="It is the strength of the operations.")


class ImageAugmentation(Algorithm):
    """Base of augmentations of batches after they are loaded (``batch=True``), or of the training dataset's images."""

    batch: bool
    _transform: Any

    runs_at: ClassVar = dict.fromkeys((Event.FIT_START, Event.AFTER_DATALOADER, Event.FIT_END), Stage.AUGMENT)
    reads: ClassVar = FieldsByEvent(
        {
            Event.FIT_START: {"train_dataloader", "evaluators"},
            Event.AFTER_DATALOADER: {"batch.input"},
            Event.FIT_END: {"train_dataloader"},
        }
    )
    writes: ClassVar = FieldsByEvent(
        {
            Event.FIT_START: {"train_dataloader"},
            Event.AFTER_DATALOADER: {"batch.input"},
            Event.FIT_END: {"train_dataloader"},
        }
    )

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return the events at which it runs: after each batch is loaded, or at both ends of a fit for the dataset."""
        return {
            event: stage for event, stage in self.runs_at.items() if self.batch is (event is Event.AFTER_DATALOADER)
        }

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Augment the batch, or add a transform to the training dataset until the end of the fit."""
        if event is Event.AFTER_DATALOADER:
            self.augment_batch(state)
            return
        if event is Event.FIT_END:
            _restore(_unwrap(getattr(state.train_dataloader, "dataset", None))[1])
            return
        if self._transform is None:
            self._transform = self.make_transform()
        _add_transform(self, self._transform, state)

    @abstractmethod
    def make_transform(self) -> Any:
        """Return the transform of single images."""

    @abstractmethod
    def augment_batch(self, state: State) -> None:
        """Augment the images of the batch."""


# Transforms that return tensors, or values that are no longer colours; the last are those of torchvision's weights.
_CONVERTERS = frozenset(
    """
    ToTensor PILToTensor ToImage ToPureTensor ToDtype ConvertImageDtype Normalize RandomErasing
    ImageClassification ObjectDetection SemanticSegmentation
    """.split()  # noqa: SIM905  (a list would take a line for each name)
)


_BEFORE = "_composer_transforms_before_fit"
"""The attribute of a dataset with the identity of the state of a fit, and the transforms before it."""


def _add_transform(algorithm: Algorithm, transform: Any, state: State) -> None:
    """Add ``transform`` to the transforms of the training dataset, once in a fit.

    It comes before the first transform that returns a tensor, or at the end of a ``Compose``, and before a single
    function, which may return a tensor, too. The dataset of a :class:`torch.utils.data.Subset` is copied, so that other
    subsets do not change.

    Raises:
        TypeError: The dataset has no ``transform`` for its images, as torchvision's datasets have.
        ValueError: There is no training data yet, its workers are running, or an evaluation uses the same dataset.
    """
    name = type(algorithm).__name__
    loader: Any = state.train_dataloader
    if loader is None:
        raise ValueError(f"{name} changes the training dataset, and there is none: set State.train_dataloader.")
    dataset = getattr(loader, "dataset", None)
    if getattr(loader, "_iterator", None) is not None and getattr(loader, "persistent_workers", False):
        raise ValueError(
            f"{name} is too late: the persistent workers of the data loader are running, with a copy of the dataset. "
            "Pass a new loader."
        )
    subset, dataset = _unwrap(dataset)
    _check(name, dataset)
    evaluated = [getattr(evaluator.dataloader.dataloader, "dataset", None) for evaluator in state.evaluators]
    if subset is None and any(_unwrap(each)[1] is dataset for each in evaluated):
        raise ValueError(
            f"{name} would change the images of the evaluation as well, which uses the same dataset object. "
            "Create a second one, without augmentation, for evaluation."
        )
    if vars(dataset).get(_BEFORE, (id(state),))[0] != id(state):
        _restore(dataset)  # after a fit that failed
    if any(each is transform for each in _steps(dataset.transform)):
        return  # added by an earlier fit that failed
    if any(type(each) is type(transform) for each in _steps(dataset.transform)):
        warn_of_no_effect(
            f"{algorithm!r} changed nothing: the dataset already applies a {type(transform).__name__}. Remove one."
        )
        return
    if subset is not None:
        dataset = subset.dataset = copy.copy(dataset)
    before = {name: getattr(dataset, name) for name in ("transform", "transforms") if hasattr(dataset, name)}
    vars(dataset).setdefault(_BEFORE, (id(state), before))
    _set_pipeline(dataset, _with(transform, dataset.transform))


def _restore(dataset: Any) -> None:
    """Give a dataset the transforms that it had before the algorithms of a fit added theirs."""
    for name, value in getattr(dataset, "__dict__", {}).pop(_BEFORE, (0, {}))[1].items():
        setattr(dataset, name, value)


def _unwrap(dataset: Any) -> tuple[Any, Any]:
    """Return the innermost subset, or None, and its dataset."""
    subset = None
    while not hasattr(dataset, "transform") and hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        subset, dataset = dataset, dataset.dataset
    return subset, dataset


def _check(name: str, dataset: Any) -> None:
    if not hasattr(dataset, "transform"):
        raise TypeError(
            f"{name} needs a dataset with a `transform` for its images, as torchvision's have, got "
            f"{type(dataset).__name__}. Add it to your own pipeline instead: cf.{name.lower()}()."
        )
    joint = getattr(dataset, "transforms", None)
    if joint is not None and not hasattr(joint, "transform"):
        raise TypeError(
            f"{name} changes images and not targets, but the dataset transforms both together, by "
            f"{type(joint).__name__}. If the targets are class labels, add it to that transform: cf.{name.lower()}()."
        )


def _steps(pipeline: Callable[[Any], Any] | None) -> Sequence[Any]:
    """Return the transforms of a pipeline."""
    if pipeline is None:
        return []
    return list(pipeline.transforms) if hasattr(pipeline, "transforms") else [pipeline]


def _with(transform: Any, pipeline: Any) -> Any:
    """Return a pipeline with ``transform`` in it; ``pipeline`` does not change."""
    if pipeline is None:
        return transform
    steps = _steps(pipeline)
    end = len(steps) if hasattr(pipeline, "transforms") else 0
    position = next((index for index, step in enumerate(steps) if type(step).__name__ in _CONVERTERS), end)
    changed = [*steps[:position], transform, *steps[position:]]
    if hasattr(pipeline, "transforms"):  # as torchvision's Compose, of version 1 or 2
        return type(pipeline)(changed)
    return _InOrder(changed)


def _set_pipeline(dataset: Any, pipeline: Any) -> None:
    dataset.transform = pipeline
    if not hasattr(dataset, "transforms"):
        return
    # torchvision stores the image's transform in two places, and its datasets use either.
    if dataset.transforms is None:
        pair = importlib.import_module("torchvision.datasets.vision").StandardTransform
        dataset.transforms = pair(pipeline, getattr(dataset, "target_transform", None))
    else:
        dataset.transforms = copy.copy(dataset.transforms)
        dataset.transforms.transform = pipeline


class _InOrder:
    """A pipeline that applies transforms one after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image

    def __repr__(self) -> str:
        return f"{self.transforms}"

"""torchvision's models, each with the loss and the metrics of its task."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from composer.functional.checks import few
from composer.models.classifier import ComposerClassifier
from composer.models.detector import ComposerDetector
from composer.models.names import suggest
from composer.models.segmenter import ComposerSegmenter

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torchvision.models import WeightsEnum  # type: ignore[import-untyped]

# With auxiliary heads, torchvision's default, the training outputs of these two have another structure, and torchvision
# warns about their initialisation.
_WITH_AUXILIARY_HEADS = {"googlenet", "inception_v3"}
_OLD_NAMES = {"pretrained": "weights", "pretrained_backbone": "weights_backbone"}


def composer_torchvision(
    model_name: str, num_classes: int | None = None, weights: WeightsEnum | str | None = None, **kwargs: Any
) -> ComposerClassifier | ComposerSegmenter | ComposerDetector:
    """Build one of torchvision's models, ready to be trained.

    Classifiers of images and videos become a :class:`~composer.models.ComposerClassifier`, segmentation models a
    :class:`~composer.models.ComposerSegmenter` and detectors a :class:`~composer.models.ComposerDetector`.
    ``torchvision.models.list_models()`` has the names.

    Pretrained weights of a classifier or segmentation model can be combined with another ``num_classes``: then only the
    layers of the scores are new. For a detector use ``weights_backbone="DEFAULT"``, which is also
    torchvision's own default, and downloads; ``weights_backbone=None`` does not.

    Args:
        model_name: For instance ``"resnet50"``, ``"deeplabv3_resnet50"`` or ``"fasterrcnn_resnet50_fpn"``.
        num_classes: The number of classes, in segmentation and detection including the background; if ``None``, that of
            the weights, or else torchvision's default.
        weights: Pretrained weights: ``"DEFAULT"``, another name, or a member of the model's enum; random if ``None``.
        kwargs: Passed to the model's builder; except those of the wrapper class (``train_metrics``,
            ``val_metrics``, ``loss_fn``, ``ignore_index``, ``aux_weight``), which are passed to it.

    Raises:
        TypeError: ``pretrained`` is torchvision's old name; or an argument is unknown.
        ValueError: The model is unknown, or its task is not supported; ``num_classes`` is less than 1; the weights are
            unknown; or they have another number of classes and the model is a detector.

    Example:
        >>> model = composer_torchvision("resnet18", num_classes=10)
        >>> type(model).__name__, model.module.fc.out_features
        ('ComposerClassifier', 10)
        >>> composer_torchvision("resnet-18")
        Traceback (most recent call last):
        ValueError: torchvision has no model 'resnet-18'. Did you mean 'resnet18'...
    """
    for old, new in _OLD_NAMES.items():
        if old in kwargs:
            raise TypeError(f"{old}= is torchvision's old name; use {new}='DEFAULT', or {new}=None for random weights.")
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}.")
    builder = _find_builder(model_name)
    # Builders are in torchvision.models.<task>.<module>, and those of classifiers in torchvision.models.<module>.
    task = builder.__module__.rpartition(".")[0].rpartition(".")[2]
    if task in {"optical_flow", "quantization"}:
        raise ValueError(
            f"{model_name!r} is a model of torchvision.models.{task}, and composer_torchvision builds models for "
            "classification, segmentation and detection. For others derive from ComposerModel."
        )
    if task == "segmentation":
        return _segmenter(builder, num_classes, weights, kwargs)
    if task == "detection":
        return _detector(builder, num_classes, weights, kwargs)
    return _classifier(builder, num_classes, weights, kwargs)


def _find_builder(model_name: str) -> Callable[..., nn.Module]:
    # Importing it takes a second.
    from torchvision import models  # type: ignore[import-untyped]  # noqa: PLC0415

    if model_name.lower() not in models.list_models():
        known = models.list_models(exclude=["quantized_*", "raft_*"])
        raise ValueError(f"torchvision has no model {model_name!r}.{suggest(model_name, known)}")
    builder: Callable[..., nn.Module] = models.get_model_builder(model_name)
    return builder


def _classifier(
    builder: Callable[..., nn.Module], num_classes: int | None, weights: Any, kwargs: dict[str, Any]
) -> ComposerClassifier:
    settings = _take_settings(ComposerClassifier, kwargs)
    if builder.__name__ in _WITH_AUXILIARY_HEADS:
        if kwargs.setdefault("aux_logits", False):
            raise ValueError(f"aux_logits=True has no loss here; {builder.__name__} is built without auxiliary heads.")
        if weights is None:
            kwargs.setdefault("init_weights", True)
    module = _build(builder, num_classes, weights, kwargs)
    if num_classes is None:
        # By default a model has the number of classes of its weights; not all models have an attribute for it.
        described: Any = _find_weights(builder, weights) or _find_weights(builder, "DEFAULT")
        num_classes = len(described.meta["categories"])
    return ComposerClassifier(module, _distinguished(num_classes), **settings)


def _segmenter(
    builder: Callable[..., nn.Module], num_classes: int | None, weights: Any, kwargs: dict[str, Any]
) -> ComposerSegmenter:
    settings = _take_settings(ComposerSegmenter, kwargs)
    unknown = sorted(kwargs.keys() - inspect.signature(builder).parameters.keys() - {"aux_loss"})
    if unknown:
        # torchvision accepts and ignores unknown arguments.
        raise TypeError(f"{builder.__name__} has no argument {', '.join(map(repr, unknown))}.")
    module = _build(builder, num_classes, weights, kwargs)
    return ComposerSegmenter(module, _distinguished(num_classes), **settings)


def _distinguished(num_scores: int | None) -> int | None:
    """Return the number of classes that so many scores distinguish: one is the score of the second of two."""
    return 2 if num_scores == 1 else num_scores


def _detector(
    builder: Callable[..., nn.Module], num_classes: int | None, weights: Any, kwargs: dict[str, Any]
) -> ComposerDetector:
    settings = _take_settings(ComposerDetector, kwargs)
    chosen = _find_weights(builder, weights)
    if chosen is not None and num_classes not in {None, len(chosen.meta["categories"])}:
        raise ValueError(
            f"num_classes={num_classes} does not fit {chosen}, which detects {len(chosen.meta['categories'])} classes. "
            "For your own classes start with a pretrained backbone: weights=None, weights_backbone='DEFAULT'."
        )
    return ComposerDetector(builder(weights=chosen, **_given(num_classes), **kwargs), **settings)


def _take_settings(cls: type, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments of the wrapper class from ``kwargs`` and return them."""
    return {name: kwargs.pop(name) for name in inspect.signature(cls).parameters if name in kwargs}


def _given(num_classes: int | None) -> dict[str, int]:
    # Some builders do not accept None for the default number of classes.
    return {} if num_classes is None else {"num_classes": num_classes}


def _find_weights(builder: Callable[..., nn.Module], weights: WeightsEnum | str | None) -> WeightsEnum | None:
    from torchvision.models import get_model_weights  # noqa: PLC0415 (takes a second)

    known = get_model_weights(builder)
    try:
        chosen: WeightsEnum | None = known.verify(weights)
    except (KeyError, TypeError):
        names = ", ".join(["'DEFAULT'", *(repr(each.name) for each in known)])
        raise ValueError(f"weights of {builder.__name__} must be None or one of {names}, got {weights!r}.") from None
    return chosen


def _build(
    builder: Callable[..., nn.Module],
    num_classes: int | None,
    weights: WeightsEnum | str | None,
    kwargs: dict[str, Any],
) -> nn.Module:
    """Build the model; with weights of another number of classes, load all except those of the last layers."""
    chosen = _find_weights(builder, weights)
    fits = chosen is None or num_classes in {None, len(chosen.meta["categories"])}
    # If the weights include auxiliary heads, torchvision builds the model only with them.
    if chosen is None or (fits and builder.__name__ not in _WITH_AUXILIARY_HEADS):
        return builder(weights=chosen, **_given(num_classes), **kwargs)
    # The arguments that torchvision sets when it loads weights.
    takes = inspect.signature(builder).parameters.keys()
    implied = {name: value for name, value in {"weights_backbone": None, "aux_loss": True}.items() if name in takes}
    if builder.__name__ in _WITH_AUXILIARY_HEADS:
        implied |= {"transform_input": True, "init_weights": False}
    module = builder(**_given(num_classes), **(implied | kwargs))
    _load_all_but_scores(module, chosen)
    return module


def _load_all_but_scores(module: nn.Module, weights: WeightsEnum) -> None:
    loaded, own = weights.get_state_dict(progress=True, check_hash=True), module.state_dict()
    fitting = {name: value for name, value in loaded.items() if name in own and own[name].shape == value.shape}
    # A layer of scores differs only in its first dimension.
    num_scores = len(weights.meta["categories"])
    unfit = [
        name
        for name, value in own.items()
        if name not in fitting
        and (name not in loaded or loaded[name].shape[:1] != (num_scores,) or loaded[name].shape[1:] != value.shape[1:])
    ]
    if unfit:
        raise ValueError(
            f"{weights} does not fit the model, which was built with other settings: {few(unfit)}. "
            "Omit the settings that change its layers, or weights."
        )
    module.load_state_dict(fitting, strict=False)

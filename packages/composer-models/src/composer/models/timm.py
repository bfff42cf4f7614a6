"""timm's models, with the loss and the metrics of classification."""

from __future__ import annotations

import inspect
from typing import Any

from composer.models.classifier import ComposerClassifier
from composer.models.names import import_extra, suggest


def composer_timm(model_name: str, num_classes: int | None = None, **kwargs: Any) -> ComposerClassifier:
    """Build one of timm's models, ready to be trained.

    Args:
        model_name: One of ``timm.list_models()``, optionally with the name of pretrained weights
            (``"resnet50.a1_in1k"``), or a location (``"hf-hub:…"``, ``"local-dir:…"``).
        num_classes: The number of classes; timm's default for the model if ``None``.
        kwargs: Passed to ``timm.create_model``: ``pretrained`` (downloads weights), ``drop_path_rate``, ``img_size``,
            …; except ``train_metrics``, ``val_metrics`` and ``loss_fn``, which are passed to
            :class:`~composer.models.ComposerClassifier`.

    Raises:
        ModuleNotFoundError: timm is not installed.
        ValueError: The model is unknown, or ``num_classes`` is less than 1.

    Example:
        >>> model = composer_timm("resnet18", num_classes=10)
        >>> model.module.fc.out_features
        10
        >>> composer_timm("resnet-18")
        Traceback (most recent call last):
        ValueError: timm has no model 'resnet-18'. Did you mean 'resnet18'...
    """
    timm = import_extra("timm", needed="composer_timm needs timm", extra="timm")
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}.")
    architecture = model_name.partition(".")[0]
    is_location = ":" in model_name
    if not is_location and not timm.is_model(architecture):
        raise ValueError(f"timm has no model {model_name!r}.{suggest(architecture, timm.list_models())}")
    settings = {name: kwargs.pop(name) for name in inspect.signature(ComposerClassifier).parameters if name in kwargs}
    if num_classes is not None:
        kwargs["num_classes"] = num_classes
    num_classes = 2 if num_classes == 1 else num_classes  # which one score distinguishes
    return ComposerClassifier(timm.create_model(model_name, **kwargs), num_classes, **settings)

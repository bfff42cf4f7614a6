"""Distillation: train a student on the scores of a teacher."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from composer.algorithms._idle import warn_if_idle
from composer.algorithms._scores import class_scores, shifts_labels
from composer.core import Algorithm, Event, FieldsByEvent, Logger, Stage, State, get_precision_context
from composer.core.checks import caller_level, number, one_of
from composer.core.data.batches import BatchKey, batch_get
from composer.core.saving.components import transient
from composer.core.saving.model_state import bare_model
from composer.functional.training.distillation import mean_where, soft_losses
from composer.functional.transformers_loss import classes_last

_INDEPENDENT = frozenset(
    """
    BCEWithLogitsLoss binary_cross_entropy_with_logits MultiLabelSoftMarginLoss multi_label_classification regression
    MSELoss mse_loss L1Loss l1_loss SmoothL1Loss smooth_l1_loss HuberLoss huber_loss
    """.split()  # noqa: SIM905  (a list would take a line for each name)
)
"""Losses, and types of problems in Transformers' configurations, that take each score alone."""


def _check_teacher(_: object, __: object, teacher: Any) -> None:
    if not isinstance(teacher, nn.Module):
        raise TypeError(f"teacher must be a torch.nn.Module with trained weights, got {teacher!r}.")


def _to_features(features: Any) -> dict[str, str]:
    pairs = dict(features) if isinstance(features, (Mapping, tuple, list)) else {features: features}
    if isinstance(features, str) or not all(isinstance(name, str) for pair in pairs.items() for name in pair):
        raise TypeError(
            "features must map names of modules of the model to names of modules of the teacher, got "
            f"{features!r}. For example: {{'module.layer4': 'layer4'}}."
        )
    return pairs


@attrs.define(eq=False)
class Distillation(Algorithm):
    """Train the model on the scores of a teacher, besides its own loss (arXiv:1503.02531, arXiv:2105.08919).

    The loss is ``(1 - weight) * loss + weight * soft`` with the loss ``soft`` of
    :func:`composer.functional.distillation_loss`, plus ``feature_weight`` times the mean squared difference of each
    pair of features. The teacher gets each batch as the model gets it, after augmentations, and computes in evaluation
    mode and without gradients. It is not part of the model: no checkpoint contains it, and no optimizer changes it.

    A teacher with a method ``loss``, as of :class:`composer.models.ComposerModel`, is called with the batch. Any other
    is called with one item of the batch or, if that is a dictionary, with its items by name, without labels. Labels
    that are ignored (negative, or the model's ``loss_ignore_index``) do not count for the teacher's scores, either.

    Args:
        teacher: A trained model of the same classes; it is moved to the model's device at the start of a fit.
        temperature: The number that logits are divided by, more than 0.
        weight: The weight of the teacher's scores, in ``[0, 1]``.
        kind: ``"kl"`` compares distributions, ``"mse"`` logits.
        features: Modules whose outputs are compared, too: names in the model, and for each the name in the teacher.
        feature_weight: The weight of each pair of features, added to the loss.
        input_key: The key of the samples in a batch that is no dictionary.
        target_key: The key of the labels, which state what does not count; by default ``"labels"`` of a dictionary, or
            else 1.

    Raises:
        TypeError: ``teacher`` is no module, ``features`` are no names, or a value is not a number.
        ValueError: A value is out of range. In training: the teacher has other classes, features of other shapes, or
            parameters of the model; or there is no such feature.

    Example:
        >>> Distillation(nn.Linear(4, 3), temperature=2.0, weight=0.9).weight
        0.9
    """

    teacher: nn.Module = attrs.field(validator=_check_teacher, repr=lambda teacher: f"<{type(teacher).__name__}>")
    temperature: float = number(4.0, 0, above=True, meaning="It is the number that logits are divided by.")
    weight: float = number(0.5, 0, 1, meaning="It is the weight of the teacher.")
    kind: str = attrs.field(default="kl", validator=one_of("kl", "mse"))
    features: Mapping[str, str] = attrs.field(default=(), converter=_to_features)
    feature_weight: float = number(1.0, 0, meaning="It is the weight of each pair of features.")
    input_key: BatchKey = 0
    target_key: BatchKey | None = None
    _soft: Any = transient(default=None)
    _shifts: bool = transient(default=False)
    _has_checked: bool = transient(default=False)
    _seen: dict[str, Any] = transient(factory=dict)
    _hooks: list[Any] = transient(factory=list)

    # Within AFTER_LOSS, lower stages run later: the teacher's loss is added after MixUp and CutMix have blended losses.
    runs_at: ClassVar = {
        Event.FIT_START: Stage.LOSS,
        Event.BEFORE_FORWARD: Stage.LOSS,
        Event.AFTER_FORWARD: Stage.LOSS,
        Event.AFTER_LOSS: Stage.LABEL,
    }
    reads: ClassVar = FieldsByEvent(
        {
            Event.FIT_START: {"model"},
            Event.BEFORE_FORWARD: {"model"},
            Event.AFTER_FORWARD: {"batch", "outputs", "model"},
            Event.AFTER_LOSS: {"loss"},
        }
    )
    # The model has hooks on its features from before to after the forward pass.
    writes: ClassVar = FieldsByEvent(
        {Event.BEFORE_FORWARD: {"model"}, Event.AFTER_FORWARD: {"model"}, Event.AFTER_LOSS: {"loss"}}
    )

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, weight=self.weight == 0 and not (self.features and self.feature_weight))

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return the events at which it runs: before the forward pass only if there are features."""
        events = dict(self.runs_at)
        return (
            events if self.features else {event: events[event] for event in events if event is not Event.BEFORE_FORWARD}
        )

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Prepare the teacher, compute its loss after the forward pass, and add it after the loss."""
        if event is Event.FIT_START:
            self._prepare(state)
        elif event is Event.BEFORE_FORWARD:
            self._remove_hooks()  # of a pass that an error has ended
            self._hook(bare_model(state.model), self.features)
        elif event is Event.AFTER_FORWARD:
            self._soft = self._compute(state)
        else:
            state.loss, self._soft = _combined(state.loss, self._soft, self.weight), None

    def _prepare(self, state: State) -> None:
        shared = {id(one) for one in self.teacher.parameters()} & {id(one) for one in state.model.parameters()}
        if shared:
            raise ValueError(
                "teacher must not share parameters with the model, which would change it: pass copy.deepcopy(model)."
            )
        named = (bare_model(state.model), self.features), (self.teacher, self.features.values())
        for model, names in named:
            missing = {*names} - {name for name, _ in model.named_modules()}
            if missing:
                raise ValueError(
                    f"features must name modules, got {min(missing)!r}, which {type(model).__name__} does not have. "
                    "Its named_modules() have the names."
                )
        self._shifts = shifts_labels(bare_model(state.model))
        self.teacher.to(state.device).eval()

    def _compute(self, state: State) -> Tensor:
        """Return the weighted sum of the losses of the teacher's scores and features."""
        student = dict(self._seen)
        self._remove_hooks()
        self._hook(self.teacher, self.features.values(), "teacher.")
        try:
            with torch.no_grad(), get_precision_context(state.precision, state.device.type):
                teacher_outputs = self._ask(state.batch)
            taught = dict(self._seen)
        finally:
            self._remove_hooks()
        is_mapping = isinstance(state.batch, Mapping)
        key = ("labels" if is_mapping else 1) if self.target_key is None else self.target_key
        target = None if is_mapping and key not in state.batch else batch_get(state.batch, key)
        scores, teacher_scores = _scores(state.outputs, target), _scores(teacher_outputs, target)
        if not self._has_checked and self.kind == "kl" and self.weight:
            self._has_checked = True
            _warn_of_independent(scores, target, state.model)
        counts = _counted(target, scores, self._shifts, getattr(state.model, "loss_ignore_index", -100))
        soft = mean_where(soft_losses(scores, teacher_scores, self.temperature, self.kind), counts)
        total = self.weight * soft
        for name, other in self.features.items():
            difference = _compare(student.get(name), taught.get(f"teacher.{other}"), name, counts)
            total = total + self.feature_weight * difference
        return total * state.loss_share

    def _ask(self, batch: Any) -> Any:
        teacher: Any = self.teacher
        if isinstance(batch, Mapping) and not getattr(getattr(teacher, "config", None), "is_encoder_decoder", False):
            batch = {name: value for name, value in batch.items() if name != "labels"}
        if callable(getattr(teacher, "loss", None)):
            return teacher(batch)
        return teacher(**batch) if isinstance(batch, Mapping) else teacher(batch_get(batch, self.input_key))

    def _hook(self, model: nn.Module, names: Iterable[str], prefix: str = "") -> None:
        for name in names:
            module = model.get_submodule(name)
            self._hooks.append(module.register_forward_hook(partial(self._store, f"{prefix}{name}")))

    def _store(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        self._seen[name] = output[0] if isinstance(output, (tuple, list)) else output

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._seen.clear()


def _scores(outputs: Any, target: Any) -> Tensor:
    scores: Tensor = outputs["logits"].movedim(-1, 1) if isinstance(outputs, Mapping) and target is None else outputs
    if target is not None:
        scores, is_last = class_scores(outputs, target, detaches=False)
        if is_last and (len(scores), *scores.shape[2:]) != target.shape:  # of masks, resized as in Transformers' losses
            scores = classes_last(scores.movedim(1, -1), target).movedim(-1, 1)
    return scores


def _warn_of_independent(scores: Tensor, target: Any, model: Any) -> None:
    """Warn of labels or values that do not exclude each other, for which the classes of a sample are compared."""
    loss, config = getattr(model, "loss_fn", None), getattr(model, "config", None)
    name = getattr(config, "problem_type", None) or getattr(loss, "__name__", type(loss).__name__)
    if name in _INDEPENDENT and scores.ndim > 1 < scores.shape[1] and getattr(target, "shape", None) == scores.shape:
        warnings.warn(
            f"Distillation(kind='kl') compares distributions over the scores of a sample, of which the model's loss, "
            f"{name}, takes each alone: their level is not taught. Set kind='mse', unless exactly one label is true.",
            stacklevel=caller_level(),
        )


def _counted(target: Any, scores: Tensor, shifts: bool, ignored: int) -> Tensor | None:
    """Return which targets count, shape ``(N, ...)`` as the scores without classes; None for all."""
    places = (len(scores), *scores.shape[2:])
    if not isinstance(target, Tensor) or target.is_floating_point() or target.shape != places:
        return None
    counts = (target >= 0) & (target != ignored)
    if shifts:  # the label of a position belongs to the scores of the previous one
        counts = counts.roll(-1, 1)
        counts[:, -1] = False
    return counts


def _compare(student: Any, teacher: Any, name: str, counts: Tensor | None) -> Tensor:
    shapes = [tuple(one.shape) if isinstance(one, Tensor) else None for one in (student, teacher)]
    if shapes[0] is None or shapes[0] != shapes[1]:
        raise ValueError(
            f"features must be tensors of equal shapes, got {shapes[0]} of {name!r} and {shapes[1]} of the teacher. "
            "Add a layer to the model that maps its features to those of the teacher, and name that layer."
        )
    dtype = torch.promote_types(student.dtype, torch.float32)
    fits = counts is not None and counts.shape == student.shape[: counts.ndim]
    return mean_where((student.to(dtype) - teacher.to(dtype)).square(), counts if fits else None)


def _combined(loss: Any, added: Tensor, weight: float) -> Any:
    """Return ``(1 - weight) * loss + added``; of several losses each is scaled, and one is added to them."""
    if isinstance(loss, Mapping):
        total = {"total": (1 - weight) * loss["total"] + added} if "total" in loss else {}
        return {name: (1 - weight) * one for name, one in loss.items()} | {"distillation": added} | total
    if isinstance(loss, (list, tuple)):
        return [*((1 - weight) * one for one in loss), added]
    return (1 - weight) * loss + added

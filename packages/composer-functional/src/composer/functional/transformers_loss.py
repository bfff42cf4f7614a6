"""The loss of a Transformers model for other labels than those of its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, interpolate, mse_loss

from composer.functional.layers.chunked_head import TracedLogits
from composer.functional.losses import soft_cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORED = -100
"""The label of positions that do not count."""

# Decoders that compute their loss without shifting the labels: the labels are the next tokens.
_FAMILIES = """
    Bart BigBirdPegasus Blenderbot BlenderbotSmall CpmAnt MBart Marian Mvp PLBart Pegasus Speech2Text2 TrOCR Whisper
""".split()  # noqa: SIM905  (a list would take a line for each name)
_UNSHIFTED = {*(f"{family}ForCausalLM" for family in _FAMILIES), "XLMWithLMHeadModel", "XLNetLMHeadModel"}


def predicts_next_token(model: PreTrainedModel) -> bool:
    """Return whether the model's own loss compares the logits of a position with the label of the next.

    Args:
        model: A model of Transformers, without adapters of PEFT.
    """
    from transformers.models.auto import modeling_auto  # noqa: PLC0415 (an extra of the packages that call this)

    names = {cls.__name__ for cls in type(model).__mro__}
    if getattr(model.config, "is_encoder_decoder", False) or names & _UNSHIFTED:
        return False
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    known = {name for each in causal for name in ([each] if isinstance(each, str) else each)}
    # Without an encoder, those of the second and third name are decoders of images or sounds and text.
    decoders = ("ForCausalLM", "ForConditionalGeneration", "ForVisionText2Text")
    return bool(names & known) or any(name.endswith(decoders) for name in names)


def are_probabilities(labels: object, model: PreTrainedModel) -> bool:
    """Return whether labels are probabilities, which the model's own loss would misinterpret.

    Args:
        labels: Labels of any kind.
        model: A model of Transformers, without adapters of PEFT.
    """
    if not isinstance(labels, Tensor) or not labels.is_floating_point():
        return False
    is_classifier = getattr(model.config, "problem_type", None) == "single_label_classification"
    return is_classifier or (labels.ndim == 3 and model.get_output_embeddings() is not None)


_ENDS = {"start_positions": "start_logits", "end_positions": "end_logits"}


def loss_of_answers(own: Tensor, outputs: Mapping[str, Any], batch: Mapping[str, Any]) -> Tensor:
    """Return a model's own loss, and the mean over all ends of answers if the text has not equally many of both kinds.

    The own loss is the mean of two means, over the starts and over the ends that are within the text. It is NaN if
    there are none of one kind, and otherwise not that of its microbatches. That of other models is returned unchanged.

    Args:
        own: The own loss.
        outputs: The outputs of the model.
        batch: The batch of the loss.

    Example:
        >>> import torch
        >>> outputs = {"start_logits": torch.zeros(1, 8), "end_logits": torch.zeros(1, 8)}
        >>> batch = {"start_positions": torch.tensor([3]), "end_positions": torch.tensor([9])}
        >>> loss_of_answers(torch.tensor(torch.nan), outputs, batch)
        tensor(2.0794)
    """
    if not (outputs.keys() >= set(_ENDS.values()) and batch.keys() >= _ENDS.keys()):
        return own
    logits = torch.cat([outputs[name] for name in _ENDS.values()])
    ends, length = torch.stack([batch[name].flatten() for name in _ENDS]), logits.shape[1]
    starts, others = (ends < length).sum(dim=1)
    loss = cross_entropy(logits, ends.flatten().clamp(0, length), ignore_index=length)
    return own.where((starts == others) & (starts > 0), loss)


def terms_of_task(model: PreTrainedModel, batch: object) -> Tensor | None:
    """Return the number of elements of the mean that is a model's own loss, if labels that are ignored do not show it.

    Args:
        model: A model of Transformers, without adapters of PEFT.
        batch: The batch of the loss.
    """
    names = {cls.__name__ for cls in type(model).__mro__}
    given = {key: one for key, one in batch.items() if isinstance(one, Tensor)} if isinstance(batch, Mapping) else {}
    task = next((name for name in names if name.endswith(("ForMaskedImageModeling", "ForQuestionAnswering"))), "")
    if "bool_masked_pos" in given and task.endswith("Modeling"):
        return given["bool_masked_pos"].sum()
    if {"start_positions", "end_positions", "input_ids"} <= given.keys() and task:
        # Transformers ignores an answer that is not within the text, each of its ends by itself.
        ends = torch.stack([given["start_positions"].flatten(), given["end_positions"].flatten()])
        return (ends < given["input_ids"].shape[1]).sum()
    if {"labels", "attention_mask"} <= given.keys() and names & {"ElectraForPreTraining", "FunnelForPreTraining"}:
        return (given["attention_mask"] == 1).sum()
    return None


def logits_of(outputs: Mapping[str, Any]) -> Tensor:
    """Return the logits in a model's outputs.

    Raises:
        KeyError: There are none.

    Example:
        >>> import torch
        >>> logits_of({"loss": torch.zeros(()), "logits": torch.zeros(2, 3)}).shape
        torch.Size([2, 3])
    """
    if "logits" not in outputs:
        names = ", ".join(map(repr, outputs))
        raise KeyError(
            f"The model's outputs have no 'logits', which this loss is computed from, but {names}. Algorithms that "
            "change labels need one tensor of scores: remove them, or let the model return it as 'logits'."
        )
    logits: Tensor = outputs["logits"]
    return logits.to_tensor() if isinstance(logits, TracedLogits) else logits


class LossCorrection:
    """Corrects the loss that a model has computed itself, for other labels than those it has seen.

    If the first own loss is that of the task alone, up to rounding, the loss of the task is used from then on.
    Otherwise the difference is added, so that further parts of the own loss, such as that of the balance of experts,
    stay.

    Attributes:
        is_plain: Whether the own loss is that of the task alone; None before the first, which waits for the device.

    Example:
        >>> import torch
        >>> correct, own, task = LossCorrection(), torch.tensor(3.0), torch.tensor
        >>> correct(own, lambda: task(2.0), task(2.5)), correct.is_plain  # the own loss has a further part of 1
        (tensor(3.5000), False)
    """

    def __init__(self) -> None:
        self.is_plain: bool | None = None

    def __call__(self, own: Tensor | None, task_loss_seen: Callable[[], Tensor], task_loss: Tensor) -> Tensor:
        """Return the loss for other labels.

        Args:
            own: The own loss, for the labels that the model has seen; None if it has computed none.
            task_loss_seen: Returns the loss of the task for the labels that the model has seen.
            task_loss: The loss of the task for the other labels.
        """
        if own is None or self.is_plain:
            return task_loss
        seen = task_loss_seen()
        if self.is_plain is None:
            pair = own.detach().float(), seen.detach().float()
            self.is_plain = bool(torch.isclose(*pair, rtol=1e-4, atol=1e-6, equal_nan=True))
        return task_loss if self.is_plain else own + (task_loss - seen)


def next_tokens(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits ``(N, L - 1, ...)`` of each position and the labels of the next position."""
    return logits[:, :-1], labels[:, 1:]


def without_single_score(logits: Tensor, labels: Tensor) -> Tensor:
    """Return logits of one score ``(N, 1)`` as ``(N,)`` if the labels are one number per sample."""
    is_single = logits.ndim == labels.ndim + 1 and logits.shape[-1] == 1
    return logits.squeeze(-1) if is_single else logits


def classes_last(logits: Tensor, labels: Tensor) -> Tensor:
    """Return scores of pixels, ``(N, C, h, w)`` for labels ``(N, H, W)``, as ``(N, H, W, C)``; others are unchanged.

    Models of Transformers resize them bilinearly for their loss.
    """
    if logits.ndim != 4 or labels.ndim != 3:
        return logits
    return interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False).movedim(1, -1)


def task_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    problem_type: str | None,
    shift: bool,
    reduction: str,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the loss as Transformers does, also for labels that are probabilities.

    Args:
        logits: Scores ``(N, ..., C)``, or of pixels ``(N, C, h, w)``.
        labels: Ids ``(N, ...)``, where -100 does not count; probabilities ``(N, ..., C)``, where rows of zeros do not
            count; or numbers for ``"regression"`` and ``"multi_label_classification"``.
        problem_type: The ``problem_type`` of the model's configuration.
        shift: Whether the label of a position belongs to the logits of the previous position.
        reduction: ``"mean"`` over all labels that count, their ``"sum"``; or ``"none"``, the mean for each sample.
        label_smoothing: The part of each label to distribute over all classes, for ids.

    Returns:
        A scalar, or ``(N,)``.

    Raises:
        ValueError: The shapes of labels and logits do not match.

    Example:
        >>> import torch
        >>> logits, labels = torch.zeros(2, 3, 8), torch.tensor([[1, 2, 3], [4, 5, -100]])
        >>> task_loss(logits, labels, problem_type=None, shift=True, reduction="mean")
        tensor(2.0794)
    """
    logits = classes_last(logits.float(), labels)  # as Transformers' losses do
    if shift:
        logits, labels = next_tokens(logits, labels)
    if problem_type == "regression" or logits.shape[-1] == 1:
        losses = mse_loss(_match_shape(logits, labels), labels.float(), reduction="none")
        counts = losses.new_ones(losses.shape)
    elif problem_type == "multi_label_classification":
        losses = binary_cross_entropy_with_logits(_match_shape(logits, labels), labels.float(), reduction="none")
        counts = losses.new_ones(losses.shape)
    else:
        losses, counts = cross_entropies(logits, labels, label_smoothing, "none" if reduction == "none" else "sum")
    if reduction == "none":
        return losses.flatten(1).sum(1) / counts.flatten(1).sum(1).clamp(min=1) if losses.ndim > 1 else losses
    # At least 1: where no label counts, the loss and its gradients are 0, and those of other processes are not lost.
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum().clamp(min=1)


def cross_entropies(logits: Tensor, labels: Tensor, label_smoothing: float, reduction: str) -> tuple[Tensor, Tensor]:
    """Return a loss for each label or the sum of the losses, and which labels count."""
    shape = logits.shape[:-1]
    if labels.shape == logits.shape:
        labels = labels.to(logits.dtype)
        counts = labels.sum(-1) > 0  # a row of zeros is an ignored label, as smooth_labels encodes it
    elif labels.shape == shape:
        counts = labels != IGNORED
    else:
        raise ValueError(_misfit(logits, labels))
    rows, targets = logits.reshape(-1, logits.shape[-1]), labels.flatten(0, len(shape) - 1)
    losses = soft_cross_entropy(rows, targets, reduction=reduction, label_smoothing=label_smoothing)
    return losses.reshape(shape) if reduction == "none" else losses, counts


def _match_shape(logits: Tensor, labels: Tensor) -> Tensor:
    logits = without_single_score(logits, labels)
    if logits.shape != labels.shape:
        raise ValueError(_misfit(logits, labels))
    return logits


def _misfit(logits: Tensor, labels: Tensor) -> str:
    return (
        f"The labels of shape {tuple(labels.shape)} do not fit the logits of shape {tuple(logits.shape)}: ids must "
        "have its shape without the last dimension, probabilities the same shape."
    )

"""TokenSelection: train on the tokens that a reference model predicts better."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import default_collate

from composer import functional as cf
from composer.algorithms._idle import warn_if_idle, warn_of_no_effect
from composer.algorithms._scores import shifts_labels
from composer.core import Algorithm, Event, FieldsByEvent, Logger, Stage, State, TimeUnit, get_precision_context
from composer.core.checks import number
from composer.core.data.batches import BatchKey, batch_get
from composer.core.declarations import owned
from composer.core.files import UNFINISHED
from composer.core.saving.components import transient
from composer.core.saving.model_state import bare_model
from composer.functional.checks import check_sizes
from composer.functional.modes import kept_modes
from composer.functional.transformers_loss import cross_entropies, logits_of, next_tokens


@attrs.define(eq=False)
class TokenSelection(Algorithm):
    """Train a language model on the tokens whose loss exceeds that of a reference model the most (arXiv:2404.07965).

    Of each row, the share ``keep`` of the labelled tokens is selected by :func:`composer.functional.select_tokens`, and
    the loss is the mean over the selected tokens. The losses of the reference model are computed once by
    :func:`with_reference_losses`, and are part of the batch. Rows are ranked alone: any split of a batch over
    microbatches and processes gives the same step, if the model counts its labels in ``count_loss_terms``, as
    ``HuggingFaceModel`` does. Otherwise each microbatch has the weight of its samples.

    The loss is the cross entropy of the logits, ``(N, L, V)`` or the ``"logits"`` of a dictionary; it replaces the
    model's own. With :class:`LabelSmoothing`, smoothed losses are ranked.

    Args:
        keep: The share of the tokens of each row to train on, in ``(0, 1]``.
        target_key: The key of the labels ``(N, L)`` in a batch, -100 where there is no loss.
        reference_key: The key of the losses of the reference model ``(N, L)``. Of a dictionary, the model does not get
            them.

    Raises:
        TypeError: ``keep`` is not a number. In training: the model has several losses.
        ValueError: ``keep`` is out of range. In training: the batch has no losses of a reference model, shapes do not
            fit, the outputs have no logits, or the model's loss is a sum or has parts that are not of tokens.

    Example:
        >>> TokenSelection(keep=0.7)
        TokenSelection(keep=0.7, target_key='labels', reference_key='reference_losses')
    """

    keep: float = number(0.6, 0, 1, above=True, meaning="It is the share of the tokens to train on.")
    target_key: BatchKey = "labels"
    reference_key: BatchKey = "reference_losses"

    _counts: Tensor | None = transient(default=None)  # of the batch: tokens with a weight, and tokens that count
    _totals: Tensor | None = transient(default=None)  # of the training
    _reference: Any = transient(default=None)
    _shifts: bool = transient(default=False)

    acted_unit = "tokens"
    # At AFTER_LOSS before all algorithms that blend losses, or add to them: higher stages are first there.
    runs_at: ClassVar = {
        Event.FIT_START: Stage.SELECT,
        Event.BEFORE_FORWARD: Stage.SELECT,
        Event.AFTER_LOSS: Stage.GRADIENT,
        Event.BATCH_END: Stage.SELECT,
        Event.FIT_END: Stage.SELECT,
    }
    reads: ClassVar = FieldsByEvent(
        {
            Event.FIT_START: {"model", "timestamp"},
            Event.BEFORE_FORWARD: {"batch"},
            Event.AFTER_LOSS: {"batch", "loss", "model", "outputs"},
        }
    )
    writes: ClassVar = FieldsByEvent({Event.BEFORE_FORWARD: {"batch"}, Event.AFTER_LOSS: {"loss"}})
    owns: ClassVar = owned("the choice of samples", "A second one would select from the rest: choose one.")

    def __attrs_post_init__(self) -> None:
        warn_if_idle(self, keep=self.keep == 1)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Take the losses of the reference model out of a batch, and replace the loss by that of selected tokens."""
        if event is Event.FIT_START:
            self._begin(state)
        elif event is Event.BEFORE_FORWARD:
            self._take_reference(state)
        elif event is Event.AFTER_LOSS:
            self._select(state)
        elif event is Event.BATCH_END and self._counts is not None:
            if logger.is_heard:
                selected, counted = self._counts.unbind()
                logger.log_metrics({"token_selection/selected": selected, "token_selection/counted": counted})
            self._totals = self._counts if self._totals is None else self._totals + self._counts
        elif event is Event.FIT_END and self._totals is not None:
            selected, counted = self._totals.tolist()
            self.acted = counted - selected
            if not self.acted and self.keep < 1:
                warn_of_no_effect(
                    f"TokenSelection left out none of {counted} tokens: rows must have several labels, as the share "
                    "keep is that of each row."
                )

    def _begin(self, state: State) -> None:
        if not state.timestamp.count(TimeUnit.BATCH):
            self._totals = None
        model: Any = bare_model(state.model)
        self._shifts = shifts_labels(model)
        if getattr(model, "loss_needs_whole_batch", False):
            raise ValueError(
                "TokenSelection replaces the loss of the model, which must be a mean over tokens, but that of this "
                "model has other parts, such as the balance of experts: set config.output_router_logits=False."
            )
        if getattr(model, "loss_is_sum", False):
            raise ValueError(
                "TokenSelection replaces the loss of the model by a mean over tokens, but this model has "
                "loss_is_sum=True, which would add the means of microbatches: set it to False, and let "
                "count_loss_terms(batch) return the number of labels."
            )

    def _take_reference(self, state: State) -> None:
        batch = state.batch
        try:
            self._reference = batch_get(batch, self.reference_key)
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"A batch must have the losses of a reference model under {self.reference_key!r}: train on "
                "with_reference_losses(reference_model, samples), and let the collate_fn keep them. Transformers' "
                "Trainer removes them without remove_unused_columns=False."
            ) from error
        if isinstance(batch, Mapping):
            state.batch = {name: value for name, value in batch.items() if name != self.reference_key}

    def _select(self, state: State) -> None:
        if not isinstance(state.loss, Tensor):
            raise TypeError(f"TokenSelection needs a model with one loss, a tensor, got {type(state.loss).__name__}.")
        smoothing = getattr(state.model, "loss_label_smoothing", None) or 0.0  # None: not its own loss
        reference, self._reference = self._reference, None
        with get_precision_context(state.precision, state.device.type):
            target = batch_get(state.batch, self.target_key)
            losses, mask = _token_losses(state.outputs, target, shift=self._shifts, label_smoothing=smoothing)
        weights = cf.select_tokens(losses, reference[:, 1:] if self._shifts else reference, mask, self.keep)
        count = mask.sum()
        # Without labels, the loss and its gradients are 0, and those of other processes are not lost.
        state.loss = (weights * losses).sum() / count.clamp(min=1) / self.keep * state.loss_share
        counts = torch.stack([(weights > 0).sum(), count]) * state.batch_counts
        self._counts = counts if self._counts is None or state.microbatch <= 0 else self._counts + counts


@torch.no_grad()
def with_reference_losses(
    model: nn.Module,
    samples: Sequence[Mapping[str, Any]],
    path: str | Path | None = None,
    *,
    batch_size: int = 8,
    target_key: str = "labels",
    collate_fn: Callable[[list[Any]], Any] = default_collate,
) -> list[dict[str, Any]]:
    """Return samples with the loss of each token by a reference model, for :class:`TokenSelection`.

    It computes in evaluation mode, where the model is; each process computes all. With ``path`` the losses are stored,
    with fingerprints of the samples, of ``target_key``, and of the model's weights and configuration, and read if there
    is such a file.

    Args:
        model: A language model that returns logits ``(N, L, V)``, or a dictionary with ``"logits"``. It is called with
            a batch if it has a method ``loss``, as ``HuggingFaceModel``, and else with keywords, as in Transformers.
        samples: Dictionaries with labels ``(L,)``, such as rows of :func:`composer.core.pack_sequences`; all of one
            length, or ``collate_fn`` pads them on the right.
        path: A file for the losses.
        batch_size: The number of samples that are computed at a time.
        target_key: The key of the labels.
        collate_fn: What makes a batch of samples. It has no fingerprint: with another one, pass another ``path``.

    Returns:
        The samples, with ``"reference_losses"``, shape ``(L,)``, float32, on the CPU: at each position the loss of its
        label, 0 where there is none.

    Raises:
        ValueError: ``batch_size`` is less than 1; a loss is not finite; the model returns no logits; or the file has
            losses of other samples or of another model, or is damaged.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10, bos_token_id=0, eos_token_id=0)
        >>> ids = torch.tensor([1, 2, 3])
        >>> samples = with_reference_losses(GPT2LMHeadModel(config), [{"input_ids": ids, "labels": ids}])
        >>> samples[0]["reference_losses"].shape
        torch.Size([3])
    """
    check_sizes(batch_size=batch_size)
    samples = [samples[index] for index in range(len(samples))]
    prints = {} if path is None else _prints(model, samples, target_key)
    if path is not None and Path(path).is_file():
        losses = _read(Path(path), prints)
    else:
        losses = []
        with kept_modes(model):
            model.eval()
            for start in range(0, len(samples), batch_size):
                part = samples[start : start + batch_size]
                rows = _reference_losses(model, collate_fn(part), target_key)
                losses += [row[: len(one[target_key])] for row, one in zip(rows, part, strict=True)]
        if not all(bool(one.isfinite().all()) for one in losses):
            raise ValueError("model must have finite losses, got NaN or inf: check its weights and the labels.")
        if path is not None:
            _write(Path(path), prints, losses)
    return [{**one, "reference_losses": row} for one, row in zip(samples, losses, strict=True)]


def _reference_losses(model: nn.Module, batch: Mapping[str, Any], target_key: str) -> Tensor:
    device = next(model.parameters()).device
    batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    if callable(getattr(model, "loss", None)):
        outputs = model(batch)
    else:
        outputs = model(**{name: value for name, value in batch.items() if name != target_key})
    shift = shifts_labels(model)
    losses, _ = _token_losses(outputs, batch[target_key], shift=shift)
    return pad(losses, (int(shift), 0)).float().cpu()


def _token_losses(outputs: Any, labels: Tensor, *, shift: bool, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and which count, both ``(N, L)``, or with ``shift`` ``(N, L - 1)``."""
    try:
        logits = logits_of(outputs if isinstance(outputs, Mapping) else {"logits": outputs})
    except KeyError as error:
        raise ValueError(f"TokenSelection needs logits of the shape (N, L, V). {error.args[0]}") from error
    if not isinstance(logits, Tensor) or logits.ndim != 3 or labels.shape[:2] != logits.shape[:2]:
        raise ValueError(
            "TokenSelection needs logits of the shape (N, L, V) and labels (N, L), got "
            f"{tuple(getattr(logits, 'shape', ()))} and {tuple(labels.shape)}."
        )
    if shift:
        logits, labels = next_tokens(logits, labels)
    return cross_entropies(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, label_smoothing, "none")


def _prints(model: nn.Module, samples: Sequence[Mapping[str, Any]], target_key: str) -> dict[str, str]:
    text = repr(getattr(model, "config", None))
    # Without a method of its own, the text is an address in memory.
    settings = {"config": None if " object at 0x" in text else text, "shift": shifts_labels(model)}
    # A state may have adapters only, without the weights below them and the scales.
    weights = model.state_dict() | dict(model.named_parameters()) | dict(model.named_buffers())
    scales = {name: one.scaling for name, one in model.named_modules() if hasattr(one, "scaling")}
    return {
        "data set": _fingerprint(samples),
        "model": _fingerprint([weights, scales, settings]),
        "target_key": repr(target_key),
    }


def _fingerprint(items: Iterable[Mapping[str, Any]]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(dict(item), default=_to_json, sort_keys=True).encode())
    return digest.hexdigest()


def _to_json(value: Any) -> Any:
    """Return what has all elements of a value, whose representation may leave out some."""
    if isinstance(value, Tensor):
        elements = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return [str(value.dtype), value.shape, hashlib.sha256(elements.data).hexdigest()]
    if callable(getattr(value, "tolist", None)):  # of NumPy and others
        return [type(value).__name__, str(getattr(value, "dtype", None)), value.tolist()]
    return dict(value) if isinstance(value, Mapping) else repr(value)


def _read(path: Path, prints: Mapping[str, str]) -> list[Tensor]:
    expected = "path must have the losses of these samples by this model, but"
    remedy = "Pass another path, or delete the file."
    try:
        with safe_open(path, "pt") as file:
            found = file.metadata() or {}
            others = " and another ".join(name for name in prints if found.get(name) != prints[name])
            if others:
                raise ValueError(f"{expected} {path} is of another {others}. {remedy}")
            return [*file.get_tensor("losses").split(file.get_tensor("lengths").tolist())]
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{expected} {path} is damaged, or no such file. {remedy}") from error


def _write(path: Path, prints: dict[str, str], losses: Sequence[Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"losses": torch.cat([*losses]), "lengths": torch.tensor([*map(len, losses)])}
    # Only a rename is atomic, and several processes may write the same losses.
    unfinished = path.with_name(f"{UNFINISHED}{uuid4().hex}-{path.name}")
    try:
        save_file(tensors, unfinished, prints)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)

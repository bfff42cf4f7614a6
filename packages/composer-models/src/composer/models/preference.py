"""Models that learn which of two answers is preferred: direct preference optimization and reward models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from composer.functional import collate_pairs
from composer.functional.checks import check_interval, check_sizes
from composer.functional.modes import kept_modes
from composer.functional.transformers_loss import IGNORED, logits_of, next_tokens
from composer.models._huggingface_peft import base_of
from composer.models.huggingface import HuggingFaceModel
from composer.models.phase_metrics import update_metric


class PreferenceModel(HuggingFaceModel):
    """A model of Transformers that is trained on pairs of answers, of which the first is preferred.

    Batches are those of :func:`composer.functional.collate_pairs`. Each answer has a reward, and the loss is the
    negative log-likelihood of the preferences under the model of Bradley and Terry:
    ``-log_sigmoid(rewards[:, 0] - rewards[:, 1])``.

    - Of a causal language model, the reward is ``beta * (log_probability - reference)``: direct preference optimization
      (arXiv:2305.18290). Log-probabilities are those of the labelled tokens together, and ``reference`` those of the
      model before the training, which :meth:`with_reference` computes once.
    - Of a model for sequence classification with one label, the reward is its score: a reward model.

    Any split of a batch over microbatches and processes gives the same step. With
    :class:`~composer.algorithms.LabelSmoothing`, the preferences are wrong with half of its probability, as in
    conservative DPO. Weights are saved and exported as by :class:`HuggingFaceModel`.

    Args:
        model: A causal language model, or one for sequence classification with ``num_labels=1``, which needs a
            ``pad_token_id`` if it is a decoder; or a ``peft.PeftModel`` around one. Batches may have another id.
        tokenizer: The tokenizer, which is saved with the model.
        beta: How closely the language model stays to the reference; larger is closer. Not used for scores.
        settings: Those of :class:`HuggingFaceModel` but ``use_logits``, such as ``peft_config``. Its ``metrics`` and
            ``eval_metrics`` are updated with the probabilities that the first answer is preferred and the targets 1,
            both ``(N,)``, such as those of ``torchmetrics.classification`` for two classes; a
            ``torchmetrics.MeanMetric`` with the differences of the rewards. By default these are
            ``PreferenceAccuracy`` and ``RewardMargin``.

    Raises:
        TypeError: ``model`` is neither, or another argument is of another type.
        ValueError: ``beta`` is not positive, ``use_logits`` is True, or see :class:`HuggingFaceModel`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10, bos_token_id=0, eos_token_id=0)
        >>> model = PreferenceModel(GPT2LMHeadModel(config))
        >>> chosen, rejected = ({"input_ids": ids, "labels": ids} for ids in torch.tensor([[1, 2, 3], [1, 2, 4]]))
        >>> pairs = model.with_reference([{"chosen": chosen, "rejected": rejected}])
        >>> batch = collate_pairs(pairs)
        >>> model.eval().loss(model(batch), batch)
        tensor(0.6931, grad_fn=...)
    """

    def __init__(self, model: Any, tokenizer: Any = None, beta: float = 0.1, **settings: Any) -> None:
        if settings.get("use_logits"):
            raise ValueError("use_logits must be False, as metrics get rewards and no logits, got True.")
        check_interval("beta", beta, 0, float("inf"), "It weighs log-probabilities.", open_low=True, open_high=True)
        if settings.get("metrics") is None:
            from torchmetrics import Accuracy, MeanMetric  # noqa: PLC0415 (takes a second)

            accuracy = Accuracy("binary", validate_args=False)  # validating would synchronise with the device
            settings["metrics"] = {"PreferenceAccuracy": accuracy, "RewardMargin": MeanMetric()}
        super().__init__(model, tokenizer, **settings)
        self.beta = beta
        if not self.shift_labels and self.config.num_labels != 1:
            raise TypeError(
                "model must be a causal language model, or one for sequence classification with num_labels=1, got "
                f"{type(base_of(self.model)).__name__} with num_labels={self.config.num_labels}."
            )

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Compute the rewards of both answers of each pair.

        Args:
            batch: ``input_ids``, ``attention_mask`` and ``labels`` ``(N, 2, L)``; of a language model also
                ``reference`` ``(N, 2)``.

        Returns:
            ``{"rewards": ...}``, shape ``(N, 2)``, float32.

        Raises:
            ValueError: ``batch`` has no pairs, or no ``reference``.
        """
        needed = {"input_ids", "attention_mask", "labels", *(["reference"] if self.shift_labels else [])}
        if not isinstance(batch, Mapping) or not needed <= batch.keys() or batch["input_ids"].ndim != 3:
            got = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise ValueError(
                "PreferenceModel takes batches of collate_pairs, (N, 2, L), and of a language model with the reference "
                f"of pairs = model.with_reference(pairs), got {got}."
            )
        scores = self._scores(batch)
        return {"rewards": self.beta * (scores - batch["reference"]) if self.shift_labels else scores}

    def _scores(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the log-probabilities of the labelled tokens, or the scores of a classifier, shape ``(N, 2)``."""
        inputs = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask")}
        pad_id = getattr(self.config.get_text_config(), "pad_token_id", None)
        if not self.shift_labels and pad_id is not None:  # by which a classifier finds the last token, not by the mask
            inputs["input_ids"] = inputs["input_ids"].where(inputs["attention_mask"] != 0, pad_id)
        logits, shape = logits_of(super().forward(inputs)).float(), batch["input_ids"].shape[:2]
        if not self.shift_labels:
            return logits.view(shape)
        logits, labels = next_tokens(logits, batch["labels"].flatten(0, 1))
        # Rows of logits, which ChunkedCrossEntropy does not store.
        losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return -losses.view(*shape, -1).sum(dim=2)

    @torch.no_grad()
    def with_reference(self, pairs: Sequence[Mapping[str, Any]], batch_size: int = 8) -> list[dict[str, Any]]:
        """Return pairs with the log-probabilities of their answers, as the model is now, for :meth:`forward`.

        Call it before the training and before the trainer loads a checkpoint. It computes in evaluation mode, where the
        model is; each process computes all. ``torch.save(pairs, path)`` stores the result for further trainings.

        Args:
            pairs: Pairs as :func:`composer.functional.collate_pairs` takes them.
            batch_size: The number of pairs that are computed at a time.

        Returns:
            The pairs, with ``"reference"``, shape ``(2,)``, float32, on the CPU.

        Raises:
            ValueError: ``batch_size`` is less than 1, or see ``collate_pairs``.
        """
        check_sizes(batch_size=batch_size)
        device, references, pairs = next(self.parameters()).device, list[Tensor](), list(pairs)
        with kept_modes(self):
            self.eval()
            for start in range(0, len(pairs), batch_size):
                batch = collate_pairs(pairs[start : start + batch_size])
                references += self._scores({name: value.to(device) for name, value in batch.items()}).cpu().unbind()
        return [{**pair, "reference": reference} for pair, reference in zip(pairs, references, strict=True)]

    def loss(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Any], reduction: str = "mean") -> Tensor:
        """Return the negative log-likelihood that the first answers are preferred.

        Args:
            outputs: The result of :meth:`forward`.
            batch: Not used.
            reduction: ``"mean"`` over pairs, or ``"none"`` for each.

        Returns:
            A scalar, or ``(N,)``.
        """
        rewards = outputs["rewards"]
        first = rewards.new_zeros(len(rewards), dtype=torch.int64)
        return cross_entropy(rewards, first, reduction=reduction, label_smoothing=self._label_smoothing)

    def count_loss_terms(self, batch: Mapping[str, Any]) -> None:
        """Return None: the loss is a mean over pairs, which are the samples."""

    def update_metric(self, batch: Mapping[str, Any], outputs: Mapping[str, Tensor], metric: Any) -> None:
        """Update a metric with one batch.

        Args:
            batch: The batch.
            outputs: The result of :meth:`forward`.
            metric: See ``metrics`` of the class.
        """
        from torchmetrics import MeanMetric  # noqa: PLC0415 (imported by now)

        margins = outputs["rewards"][:, 0] - outputs["rewards"][:, 1]
        if isinstance(metric, MeanMetric):
            metric.update(margins)
        else:
            update_metric(metric, margins.sigmoid(), torch.ones_like(margins, dtype=torch.int64))

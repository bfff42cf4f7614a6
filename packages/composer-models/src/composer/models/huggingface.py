"""Models of Hugging Face Transformers, with their tokenizer, metrics and adapters."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from composer.functional import soft_cross_entropy
from composer.functional.dtensors import is_sharded
from composer.functional.modes import kept_modes
from composer.functional.training.packing import MASKS_OF_ANSWERS
from composer.functional.transformers_loss import (
    IGNORED,
    LossCorrection,
    are_probabilities,
    classes_last,
    logits_of,
    loss_of_answers,
    next_tokens,
    predicts_next_token,
    task_loss,
    terms_of_task,
    without_single_score,
)
from composer.loss._calling import count_terms
from composer.models._huggingface_checkpoint import read_checkpoint
from composer.models._huggingface_embedding import fit_embedding, resized_before
from composer.models._huggingface_peft import add_adapters, base_of, behind_prompt, is_peft_model, save_adapters_alone
from composer.models._huggingface_saved import (
    changed_layers,
    complete_weights,
    describe,
    rebuild_model,
    rebuild_tokenizer,
    write_pretrained,
)
from composer.models.base import wrong_batch, zero_without_terms
from composer.models.names import import_extra
from composer.models.phase_metrics import PhaseMetricsModel, to_probabilities

if TYPE_CHECKING:
    from pathlib import Path

    from peft import PeftConfig, PeftModel
    from torch import Tensor
    from torchmetrics import Metric
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from composer.models.phase_metrics import Metrics

_REMEDY = "Let the dataset return dictionaries, or collate with transformers.default_data_collator."
_OF_ATTENTION = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
"""Arguments of attention with packed sequences, which models take as keywords."""


class HuggingFaceModel(PhaseMetricsModel):
    """A model of Transformers: sequence classification, masked, causal and sequence-to-sequence language models, ….

    Batches are mappings, as tokenizers and Transformers' collators return them: entries that are arguments of the
    model's ``forward`` are passed to it, others (``"text"``, ``"idx"``, …) are ignored. The loss is the model's own,
    for the labels under ``"labels"``, where -100 is ignored.

    The loss is computed from the logits if the model returned no loss, if an algorithm has changed the labels since the
    forward pass (smoothed or mixed labels are probabilities ``(N, ..., C)``), or for ``reduction="none"``. It is the
    same for classification, regression and language models. Further parts of the model's own loss, such as that of the
    balance of experts, are added, if the model has computed one.

    Metrics are updated with logits and labels. If the model predicts the next token, the labels are shifted by one
    position, as in the model's own loss. A metric with ``num_classes`` is updated with one row of scores per label.

    Args:
        model: A ``transformers.PreTrainedModel``, or a ``peft.PeftModel`` around one.
        tokenizer: The tokenizer, which is saved with the model. :meth:`generate` uses its padding token.
        use_logits: Whether :meth:`eval_forward` returns only the logits, computed without labels and loss; otherwise it
            returns the complete output of the model.
        metrics: A metric, a ``MetricCollection``, a list or a dict of metrics, for training and evaluation. Each phase
            accumulates separately: evaluation uses copies.
        eval_metrics: Other metrics for evaluation. Without any, it is the loss, ``"eval/loss"``, unless ``metrics=[]``
            or ``use_logits=True``.
        shift_labels: Whether the label of a position belongs to the logits of the previous position; inferred from the
            class of the model if ``None``.
        allow_embedding_resizing: Whether to add rows to embeddings with too few rows for the tokenizer.
        peft_config: The configuration of adapters to add to the model, such as ``peft.LoraConfig(...)``; only these are
            trained.
        should_save_peft_only: Whether ``state_dict()`` of a model with adapters contains only these, other parameters
            that are trained, and layers that are added to the model later.

    Raises:
        ModuleNotFoundError: Transformers, or with ``peft_config`` PEFT, is not installed.
        TypeError: ``model``, ``tokenizer``, ``peft_config`` or the metrics are of another type.
        ValueError: The tokenizer has more tokens than the embedding has rows; ``model`` returns tuples
            (``config.return_dict=False``); or it already has adapters, and ``peft_config`` is passed.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from composer.metrics import LanguageCrossEntropy
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        ... )
        >>> model = HuggingFaceModel(BertForSequenceClassification(config), metrics=[LanguageCrossEntropy()])
        >>> batch = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "labels": torch.tensor([0, 1])}
        >>> model.loss(model(batch), batch).shape, model.shift_labels
        (torch.Size([]), False)
        >>> list(model.get_metrics(is_train=False))
        ['LanguageCrossEntropy']
    """

    model: PreTrainedModel | PeftModel

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        use_logits: bool = False,
        metrics: Metrics | None = None,
        eval_metrics: Metrics | None = None,
        shift_labels: bool | None = None,
        allow_embedding_resizing: bool = False,
        peft_config: PeftConfig | None = None,
        should_save_peft_only: bool = True,
    ) -> None:
        super().__init__()
        _check_model(model)
        _check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.resized_embeddings: tuple[str, ...] = ()
        if tokenizer is not None:
            self.resized_embeddings = fit_embedding(base_of(model), len(tokenizer), allow=allow_embedding_resizing)
        if not self.resized_embeddings and (peft_config is not None or is_peft_model(model)):
            self.resized_embeddings = resized_before(base_of(model))
        self.model = model if peft_config is None else add_adapters(model, peft_config)
        self.config = base_of(self.model).config
        self.use_logits = use_logits
        self.shift_labels = predicts_next_token(base_of(self.model)) if shift_labels is None else shift_labels
        self.using_peft = is_peft_model(self.model)
        self.should_save_peft_only = should_save_peft_only
        if self.using_peft and should_save_peft_only:
            save_adapters_alone(self)
        self._evaluates_loss = metrics is None and eval_metrics is None and not use_logits
        metrics = [] if metrics is None else metrics
        self._set_metrics(metrics, metrics if eval_metrics is None else eval_metrics, ("metrics", "eval_metrics"))
        self.model_forward_args = _argument_names(base_of(self.model))
        self._labels_seen: Tensor | None = None
        self._are_labels_checked = False
        self._correct_loss = LossCorrection()
        self.labels: Tensor | None = None
        """The labels of the batch of the last :meth:`eval_forward`, for a custom :meth:`update_metric`. With
        ``shift_labels`` they are those of the next position, and -100 at the last."""

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """Compute the model's output, with its loss if the batch has labels.

        Args:
            batch: Tensors by the names of the model's arguments, such as ``"input_ids"`` ``(N, L)``.

        Returns:
            The model's output: a mapping, of which ``"loss"`` and ``"logits"`` are used.

        Raises:
            TypeError: ``batch`` is not a mapping.
            ValueError: It contains no argument of the model.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(wrong_batch(batch, "HuggingFaceModel", "as a mapping of names to tensors", _REMEDY))
        labels = batch.get("labels")
        leave_out = {"labels"} if are_probabilities(labels, base_of(self.model)) else set()
        if not leave_out and not torch.compiler.is_exporting():  # torch.export warns about attributes that change
            self._labels_seen = labels  # loss() compares them with those that an algorithm may have set
        names = self.model_forward_args
        inputs = {name: batch[name] for name in batch if (not names or name in names) and name not in leave_out}
        if not inputs:
            raise ValueError(
                f"The batch has {sorted(map(str, batch))}, none of which {type(base_of(self.model)).__name__}.forward "
                f"takes: {sorted(names)}."
            )
        if "use_cache" in names:
            # Otherwise the output has the keys and values of each layer, which only generation uses.
            inputs.setdefault("use_cache", False)
        return self.model(**inputs)

    def loss(self, outputs: Any, batch: Mapping[str, Any], reduction: str = "mean") -> Tensor:
        """Return the loss that the model has computed, or compute it for other labels.

        Args:
            outputs: The result of :meth:`forward`.
            batch: The batch with ``"labels"``: ids ``(N, ...)``, or probabilities ``(N, ..., C)``.
            reduction: ``"mean"``; or ``"none"`` for each sample's mean over its labels, ``(N,)``.

        Returns:
            A scalar, or ``(N,)``.

        Raises:
            ValueError: The batch has no labels and the model has computed no loss, or the shapes do not match.
        """
        if self.training and not self._are_labels_checked:
            self._are_labels_checked = True  # in the first step only, as the host waits for the device
            self._check_labels(batch)
        own: Tensor | None = outputs.get("loss")
        # Algorithms replace the labels in the batch: the same object means that they have not changed.
        labels, seen = batch.get("labels"), self._labels_seen
        is_unchanged = labels is None or (labels is seen and not self._label_smoothing)
        if reduction == "mean" and own is not None and is_unchanged:
            loss = loss_of_answers(own, outputs, batch)
        else:
            loss = self._task_loss(outputs, _labels_of(batch, "a loss"), reduction, self._label_smoothing)
            if reduction != "mean":
                return loss
            if seen is not None:
                loss = self._correct_loss(own, lambda: self._task_loss(outputs, seen, reduction), loss)
        return zero_without_terms(loss, lambda: self.count_loss_terms(batch))

    def _check_labels(self, batch: Mapping[str, Any]) -> None:
        """Warn of labels that count although a mask is 0."""
        labels: Any = batch.get("labels")
        # The attention_mask of an encoder-decoder model is that of the input.
        is_of_input = getattr(self.config, "is_encoder_decoder", False)
        for name in MASKS_OF_ANSWERS if is_of_input else ("attention_mask", *MASKS_OF_ANSWERS):
            mask: Any = batch.get(name)
            fits = isinstance(mask, torch.Tensor) and mask.shape == getattr(labels, "shape", None)
            if fits and ((mask == 0) & (labels != IGNORED)).any():
                warnings.warn(f"The loss counts tokens where {name} is 0: set their labels to {IGNORED}.", stacklevel=3)

    def _smooths_labels(self) -> bool:
        return getattr(self.config, "problem_type", None) in {None, "single_label_classification"}

    def _task_loss(self, outputs: Any, labels: Tensor, reduction: str, label_smoothing: float = 0.0) -> Tensor:
        labels = behind_prompt(self.model, labels) if self.using_peft else labels
        return task_loss(
            logits_of(outputs),
            labels if labels.is_floating_point() else labels.where(labels != self.loss_ignore_index, IGNORED),
            problem_type=getattr(self.config, "problem_type", None),
            shift=self.shift_labels,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )

    def count_loss_terms(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Count the labels that the loss is the mean of; override it together with a loss that is another mean.

        Args:
            batch: The batch, see :meth:`forward`.

        Returns:
            The number of ids that are not ignored, or of rows of probabilities that are not zeros, of the next tokens
            with ``shift_labels``; of masked patches, of the ends of answers that are within the text, and of the tokens
            that are no padding, for models whose loss is the mean over these; None for samples, as without labels and
            for regressions.
        """
        if (terms := terms_of_task(base_of(self.model), batch)) is not None:
            return terms
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor) or not self._has_cross_entropy(labels):
            return None
        labels = behind_prompt(self.model, labels) if self.using_peft else labels
        labels = labels[:, 1:] if self.shift_labels else labels
        if labels.is_floating_point():
            labels = labels.movedim(-1, 1)
        return count_terms(partial(soft_cross_entropy, ignore_index=self.loss_ignore_index), labels)

    @property
    def loss_ignore_index(self) -> int:
        """The label that does not count: -100, or that of a configuration for segmentation."""
        ignored: int = getattr(self.config, "semantic_loss_ignore_index", IGNORED)
        return ignored

    def _has_cross_entropy(self, labels: Tensor) -> bool:
        """Return whether the loss for these labels is a mean over those that are not ignored."""
        if labels.is_floating_point():
            return are_probabilities(labels, base_of(self.model))
        # A classifier of Transformers sets the type of its problem in its first forward pass, to a regression with one
        # label. Losses of speech models with another alignment than one label per position are means over samples.
        has_values = getattr(self.config, "problem_type", None) in {"regression", "multi_label_classification"}
        is_regression = labels.ndim == 1 and self.config.num_labels == 1
        return not has_values and not is_regression and not hasattr(self.config, "ctc_loss_reduction")

    @property
    def loss_is_sum(self) -> bool:
        """Whether the model sums the losses of its samples, as those for CTC do by default."""
        is_ctc = self._has_known_loss() and type(base_of(self.model)).__name__.endswith("ForCTC")
        return is_ctc and self.config.ctc_loss_reduction == "sum"

    @property
    def loss_needs_whole_batch(self) -> bool:
        """Whether the model's loss is known to be no mean, as its configuration and the arguments of ``forward`` show.

        True for the balance of experts (``output_router_logits=True``), contrastive losses of pairs, detectors, which
        divide by the objects of a batch, and losses of several kinds of labels, which are means over different
        elements.
        """
        names, routed = self.model_forward_args, self.config.get_text_config()
        balances = getattr(routed, "output_router_logits", False) and getattr(routed, "router_aux_loss_coef", 1) != 0
        compares = "return_loss" in names and hasattr(self.config, "text_config")
        detects = type(base_of(self.model)).__name__.endswith(("ForObjectDetection", "DetrForSegmentation"))
        counts = detects or "sampled_negative_indices" in names
        has_several = sum("label" in name for name in names) > 1
        return self._has_known_loss() and bool(balances or compares or counts or has_several)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Return the metrics of a phase: those that were passed, and without any in evaluation the loss.

        Args:
            is_train: Whether to return those of training or of evaluation.

        Returns:
            Metrics by the name under which they are logged.
        """
        kind, own = type(self), super().get_metrics(is_train)
        is_overridden = (
            kind.eval_forward is not HuggingFaceModel.eval_forward
            or kind.update_metric is not HuggingFaceModel.update_metric
        )
        if is_train or own or is_overridden or not self._evaluates_loss:
            return own
        from composer.metrics import ModelLoss  # noqa: PLC0415 (imports torchmetrics, which takes a second)

        return {"loss": ModelLoss()}

    def _count_samples(self, batch: Mapping[str, Any]) -> int:
        return len(_labels_of(batch, "a loss"))

    def eval_forward(self, batch: Mapping[str, Any], outputs: Any | None = None) -> Any:
        """Compute the outputs that metrics are updated with; the batch does not change.

        Args:
            batch: The batch, see :meth:`forward`. One with ``"mode": "generate"`` has prompts, and may have
                ``"generation_kwargs"`` for :meth:`generate`; its labels are passed on to metrics with ``needs_batch``.
            outputs: The result of :meth:`forward` for this batch, if it has been computed already.

        Returns:
            The logits with ``use_logits=True``, otherwise the model's output; of prompts a list of the texts that the
            model generates after them.
        """
        self.labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if isinstance(batch, Mapping) and batch.get("mode") == "generate":
            return self._generate_answers(batch)
        if self.labels is not None and self.shift_labels:
            self.labels = self.labels.roll(-1, dims=1)
            self.labels[:, -1] = -100
        if not self.use_logits:
            return self(batch) if outputs is None else outputs
        if outputs is None:
            outputs = self(self._without_labels(batch))
        return logits_of(outputs)

    def _generate_answers(self, batch: Mapping[str, Any]) -> list[str]:
        if self.tokenizer is None:
            raise ValueError("A batch with mode='generate' needs a tokenizer: HuggingFaceModel(model, tokenizer).")
        prompts, settings = batch["input_ids"], batch.get("generation_kwargs") or {}
        tokens = self.generate(prompts, attention_mask=batch.get("attention_mask"), **settings)
        answers = tokens if self.config.is_encoder_decoder else tokens[:, prompts.shape[1] :]
        texts: list[str] = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return texts

    def _without_labels(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the batch without labels, with the decoder inputs that an encoder-decoder model derives from them."""
        if not isinstance(batch, Mapping) or "labels" not in batch:
            return batch
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        has_inputs = "decoder_input_ids" in batch or "decoder_inputs_embeds" in batch
        make = getattr(base_of(self.model), "prepare_decoder_input_ids_from_labels", None)
        if not has_inputs and make is not None and self.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = make(labels=batch["labels"])
        return inputs

    def update_metric(self, batch: Mapping[str, Any], outputs: Any, metric: Metric) -> Any:
        """Update a metric with one batch.

        Args:
            batch: The batch, with ``"labels"``.
            outputs: The result of :meth:`eval_forward`: logits, or an output with logits.
            metric: Called as ``metric.update(logits, labels)``, with ``(N, L, V)`` and ``(N, L)`` of a language model;
                a metric with ``num_classes`` with ``(N * L, V)`` and ``(N * L,)``. Metrics of torchmetrics that compute
                probabilities are called with these. A metric whose ``needs_batch`` is true is called as
                ``metric.update(batch=batch, outputs=outputs, labels=self.labels)``. With ``use_logits=False``, a metric
                of your own gets the model's output instead of the logits if the first argument of its ``update`` is
                annotated as a ``Mapping``, or if the batch has no labels, which are None then.

        Returns:
            What ``metric.update`` returns: None, or a dictionary for ``state.metric_outputs``.

        Raises:
            ValueError: The batch has no labels, or the metric has another number of classes than the logits.
        """
        # These import torchmetrics, which is imported by now.
        from composer.metrics import CrossEntropy, ModelLoss  # noqa: PLC0415

        if isinstance(metric, ModelLoss):
            # Of prompts, and of batches without labels for callbacks, nothing is counted.
            has_loss = isinstance(outputs, Mapping) and batch.get("labels") is not None
            return self._update_loss(batch, outputs, metric) if has_loss else None
        if getattr(metric, "needs_batch", False):
            return metric.update(batch=batch, outputs=outputs, labels=self.labels)
        is_own = type(metric).__module__.partition(".")[0] not in {"torchmetrics", "composer"}
        if is_own and isinstance(outputs, Mapping) and (batch.get("labels") is None or _takes_mapping(metric)):
            return metric.update(outputs, self.labels)
        labels = _labels_of(batch, "a metric")
        logits = logits_of(outputs) if isinstance(outputs, Mapping) else outputs
        labels = behind_prompt(self.model, labels) if self.using_peft else labels
        if self.shift_labels:
            logits, labels = next_tokens(logits, labels)
        logits = without_single_score(logits, labels)
        if hasattr(metric, "num_classes") or isinstance(metric, CrossEntropy):
            logits, labels = _rows(classes_last(logits, labels), labels, getattr(metric, "num_classes", None))
        return metric.update(to_probabilities(metric, logits, labels), labels)

    def generate(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """Generate tokens from prompts, in evaluation mode.

        Args:
            input_ids: The prompts, shape ``(N, L)``. Causal models need padding on the left, with an
                ``attention_mask``.
            kwargs: Passed to Transformers' ``generate``: ``attention_mask``, ``max_new_tokens``, ``do_sample``, ….
                The padding token is that of the tokenizer, unless ``pad_token_id`` is passed. All processes of a
                sharded model must call it, and ``torch.distributed.fsdp.register_fsdp_forward_method`` must have
                registered it, which the Trainer does.

        Returns:
            Token ids ``(N, L')``.

        Raises:
            TypeError: The model predicts no tokens, so it cannot generate.
        """
        base = base_of(self.model)
        if not getattr(base, "can_generate", lambda: hasattr(base, "generate"))():
            raise TypeError(
                f"{type(base).__name__} predicts no tokens, so it cannot generate. "
                "Use a causal or a sequence-to-sequence language model."
            )
        if self.tokenizer is not None and self.tokenizer.pad_token_id is not None:
            kwargs.setdefault("pad_token_id", self.tokenizer.pad_token_id)
        if is_sharded(self):
            kwargs.setdefault("synced_gpus", True)  # all processes gather the weights until the last one is done
        with kept_modes(self.model):
            self.model.eval()
            tokens: Tensor = self.model.generate(input_ids=input_ids, **kwargs)
        return tokens

    def get_metadata(self) -> dict[str, Any]:
        """Return the data that a checkpoint needs, besides the weights, to reconstruct model and tokenizer.

        Returns:
            ``{"huggingface": ...}``: the class of the model, and the contents of the files that ``save_pretrained``
            writes for configuration, tokenizer and adapters, as JSON-compatible data.
        """
        adapters = {
            "saved_alone": self.using_peft and self.should_save_peft_only,
            "with_embeddings": bool(self.resized_embeddings),
        }
        return {"huggingface": describe(self.model, self.tokenizer, adapters)}

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write weights, configuration and tokenizer to a folder that Transformers' ``from_pretrained`` reads.

        These are the current weights. After a training with averages, such as EMA's, write them in
        ``with composer.core.evaluation_weights(trainer.state)``, or by :class:`~composer.callbacks.SavePretrained`.

        Of a model with adapters these alone are written, for ``PeftModel.from_pretrained``. In several processes the
        first one writes, and all of a sharded model must call it: the first one holds the complete weights.

        Args:
            save_directory: The folder; files of an earlier save are replaced.

        Raises:
            ValueError: It is no model of Transformers, or has layers that these models cannot have.
        """
        self.pretrained_writer()(save_directory)

    def pretrained_writer(self) -> Callable[[str | Path], None]:
        """Gather the weights for :meth:`save_pretrained` in all processes, and return the function that writes them.

        Returns:
            A function of the folder, without communication; it writes in the first process, and does nothing in others.

        Raises:
            ValueError: It is no model of Transformers, or has layers that these models cannot have.
        """
        if not hasattr(self.model, "save_pretrained"):
            raise ValueError(f"{type(self.model).__name__} is no transformers.PreTrainedModel: save a checkpoint.")
        if changed := changed_layers(base_of(self.model)):
            raise ValueError(
                f"The model has layers that a model of Transformers cannot represent: {', '.join(changed)}. Save a "
                "checkpoint, or train without the algorithm that has changed them."
            )
        weights, resized = complete_weights(self, "model."), bool(self.resized_embeddings)

        def write(folder: str | Path) -> None:
            if weights is not None:
                write_pretrained(self.model, self.tokenizer, folder, weights, with_embeddings=resized)

        return write

    load_huggingface_tokenizer_from_saved_state = staticmethod(rebuild_tokenizer)
    load_huggingface_model_from_saved_state = staticmethod(rebuild_model)

    @staticmethod
    def hf_from_composer_checkpoint(
        checkpoint_path: str | Path,
        model_instantiation_class: type | str | None = None,
        model_config_kwargs: Mapping[str, Any] | None = None,
        local_checkpoint_save_location: str | Path | None = None,
        trust_remote_code: bool = False,
        base_model: str | Path | None = None,
    ) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase | None]:
        """Reconstruct model and tokenizer from a checkpoint. Nothing in it is executed.

        Args:
            checkpoint_path: The folder of the checkpoint, local or remote (``"s3://bucket/ep3-ba1200"``).
            model_instantiation_class: Another class than that of the trained model: a class of Transformers or your
                own, an ``AutoModelFor…``, or a name in ``transformers``. Weights that only it has, such as those of
                another head, are initialized by Transformers, and named in a warning.
            model_config_kwargs: Changes to the configuration.
            local_checkpoint_save_location: The folder for the files of a remote checkpoint, in which those of an
                earlier checkpoint are deleted; a temporary folder if ``None``.
            trust_remote_code: Whether code that was saved with configuration or tokenizer may run.
            base_model: Folder or name of the base model, if the checkpoint holds adapters alone. It is read with
                ``from_pretrained``; the name in the checkpoint is never used, as a file does not choose what is read.

        Returns:
            The Transformers (or PEFT) model in evaluation mode, and the tokenizer; ``None`` if none was saved.

        Raises:
            FileNotFoundError: The checkpoint does not exist.
            ValueError: It contains no Transformers model, its class is unknown, the weights do not fit, or it holds
                adapters alone and there is no ``base_model``.
        """
        described, weights = read_checkpoint(checkpoint_path, local_checkpoint_save_location)
        model = rebuild_model(
            described, weights, model_instantiation_class, model_config_kwargs, trust_remote_code, base_model
        )
        return model, rebuild_tokenizer(described, trust_remote_code)


def _check_model(model: object) -> None:
    """Raise an error for an object that is not a model of Transformers, or a model that returns tuples."""
    transformers = import_extra("transformers", needed="HuggingFaceModel needs Transformers", extra="huggingface")
    if not isinstance(model, transformers.PreTrainedModel) and not is_peft_model(model):
        message = (
            "model must be a transformers.PreTrainedModel or a peft.PeftModel around one, "
            f"got {type(model).__name__}. For other modules derive from ComposerModel."
        )
        if not hasattr(model, "config"):
            raise TypeError(message)
        warnings.warn(f"{message} Its forward and its config are used as of one of Transformers.", stacklevel=4)
    if not getattr(base_of(model).config, "return_dict", True):
        raise ValueError(
            "The model's config.return_dict is False, so it returns tuples, in which the loss cannot be identified. "
            "Set it to True."
        )


def _check_tokenizer(tokenizer: object) -> None:
    """Raise a TypeError for an object that is not a tokenizer of Transformers."""
    from transformers import PreTrainedTokenizerBase  # noqa: PLC0415 (an extra)

    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"tokenizer must be one of Transformers', got {type(tokenizer).__name__}. "
            "Wrap one of the tokenizers package in transformers.PreTrainedTokenizerFast(tokenizer_object=...)."
        )


def _argument_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the arguments of the model's ``forward``; none if they are only ``*args, **kwargs``."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = {each.name for each in parameters if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}}
    takes_more = names and any(each.kind is each.VAR_KEYWORD for each in parameters)
    return frozenset(names | _OF_ATTENTION if takes_more else names)


def _takes_mapping(metric: Metric) -> bool:
    """Return whether the first argument of ``update`` is annotated as a mapping."""
    return "Mapping" in str(next(iter(inspect.signature(metric.update).parameters.values())).annotation)


def _labels_of(batch: Mapping[str, Any], purpose: str) -> Tensor:
    labels: Tensor | None = batch.get("labels")
    if labels is None:
        raise ValueError(
            f"The batch has no 'labels', without which {purpose} cannot be computed: it has "
            f"{sorted(map(str, batch))}. Add them in the dataset or its collator."
        )
    return labels


def _rows(logits: Tensor, labels: Tensor, num_classes: int | None) -> tuple[Tensor, Tensor]:
    """Return scores ``(M, C)`` and labels ``(M,)`` for a metric whose second dimension is the classes."""
    if logits.ndim < 2 or (num_classes is not None and logits.shape[-1] != num_classes):
        raise ValueError(
            f"The metric counts {num_classes} classes, but the logits of shape {tuple(logits.shape)} do not hold as "
            "many scores per label. Create the metric with the right number."
        )
    return logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)

"""Algorithms in the Trainer of Transformers."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from transformers import PreTrainedModel, Trainer, TrainerCallback

from composer import functional as cf
from composer.core import Algorithm, Event, Plan, TimeUnit, join_tensors, split_tensors
from composer.core.data.spec import length_of
from composer.core.evaluator import enter_training_mode
from composer.core.hosts.adapter import Adapter, served_fields
from composer.core.step import SplitStep
from composer.core.time import Timestamp
from composer.functional.signatures import unquote_annotations
from composer.functional.transformers_loss import (
    IGNORED,
    LossCorrection,
    are_probabilities,
    predicts_next_token,
    task_loss,
)

__all__ = ["STATE_FILE", "ComposerTrainer", "composer_trainer"]

STATE_FILE = "algorithms.safetensors"
"""The file in a checkpoint's folder with the state of the algorithms."""

_SERVES = served_fields("Transformers' Trainer", not_writable={"train_dataloader"})


class ComposerTrainer(Trainer):  # type: ignore[misc]  # Transformers has no types
    """Transformers' ``Trainer`` with algorithms; :func:`composer_trainer` adds them to subclasses of it.

    Algorithms change the model when the trainer is created, before weights are loaded and the optimizer is created.
    A batch of their clock is a step of the optimizer.

    The loss is the one that Transformers computes. Only if an algorithm has changed the labels, the loss is computed
    from the model's logits. Further parts of the model's own loss, such as that of the balance of experts, are added;
    the first step with changed labels finds out whether there are any. If there are none, and an algorithm changes the
    labels after each forward pass, as LabelSmoothing does, a ``PreTrainedModel`` is called without labels from then on,
    unless it is an encoder with a decoder.

    Checkpoints contain the state of the algorithms in the file ``algorithms.safetensors``, which is read without
    ``torch.load``. Averages, such as EMA's, are in the model during evaluation and prediction, and are what
    ``save_model`` and checkpoints save as the model; the training weights are in ``algorithms.safetensors``. With
    ``load_best_model_at_end`` the model has the best saved weights from the end of the training on.

    Args:
        args: Arguments of ``Trainer``, by position or name, such as ``model=`` and ``args=``.
        algorithms: One or several algorithms.
        kwargs: Further arguments of ``Trainer``.

    Attributes:
        algorithm_adapter: Runs the algorithms; a :class:`composer.core.Adapter`.

    Raises:
        AlgorithmConflictError: Two of the algorithms cannot work together.
        ValueError: An algorithm cannot run in Transformers, or not with these arguments of the training.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> from composer.algorithms import GatedLinearUnits, LabelSmoothing
        >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        >>> trainer = ComposerTrainer(
        ...     model=BertForSequenceClassification(BertConfig(vocab_size=50, **sizes)),
        ...     args=TrainingArguments(tempfile.mkdtemp(), report_to=[], use_cpu=True),
        ...     algorithms=[GatedLinearUnits(), LabelSmoothing(0.1)],
        ... )
        >>> "GatedLinearUnit" in str(trainer.model)
        True
    """

    def __init__(self, *args: Any, algorithms: Algorithm | Iterable[Algorithm] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_host(self)
        self._logged: dict[str, Any] = {}
        self._has_best_model = self._is_training_step = False
        self._call: _Call | None = None
        precision = "amp_bf16" if self.args.bf16 else "amp_fp16" if self.args.fp16 else "fp32"
        model = self.model
        self.algorithm_adapter = Adapter(
            _SERVES,
            model,
            algorithms,
            forward=self._compute_outputs,
            loss=self._compute_loss_of,
            seed=self.args.seed,
            precision=precision,
            device=self.args.device,
            log=lambda metrics, _: self._logged.update(metrics),
            world_size=self.args.world_size,
        )
        _check_algorithms(self)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._transformer = base if isinstance(base, PreTrainedModel) else None
        self._shifts_labels = self._transformer is not None and predicts_next_token(self._transformer)
        computing = _model_with_loss(self)
        if computing is not None and computing.get_output_embeddings() is not None:
            model.loss_label_smoothing = 0.0  # LabelSmoothing sets it, instead of writing probabilities of all tokens
        self._correct_loss, self._uses_num_items = LossCorrection(), _uses_num_items(self._transformer)
        self._may_skip_loss, self._needs_outputs = _may_skip_loss(self), self.algorithm_adapter.needs_outputs
        # GyroDropout's layers depend on the length of the training.
        needs_length = any("dataloader_len" in one.reads for one in self.explain().entries.get(Event.INIT, ()))
        loader = self.get_train_dataloader() if needs_length and self.train_dataset is not None else None
        self.algorithm_adapter.prepare(self.optimizer, **self._training(loader))
        _check_head(self)
        self.add_callback(_Events(self))

    def explain(self, *, verbose: bool = False) -> Plan:
        """Return the plan: what runs at which event, in which order and why; ``verbose`` shows callbacks, too."""
        return self.algorithm_adapter.explain(verbose=verbose)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Compute loss and gradients of a batch, as algorithms have changed it."""
        self._call = _Call(model, inputs, num_items_in_batch)
        return self._compute_gradients()

    def _compute_gradients(self) -> Tensor:
        assert self._call is not None
        self._is_training_step = True
        try:
            loss: Tensor = super().training_step(self._call.model, self._call.inputs, self._call.num_items)
        finally:
            self._is_training_step = False
        if self._call.batch is None and self.algorithm_adapter.state.algorithms:
            name = type(self).__name__
            raise TypeError(
                f"{name}.compute_loss did not call that of ComposerTrainer, in which algorithms run. Derive {name} "
                "from transformers.Trainer, and create composer_trainer(...) of it."
            )
        self._call.loss = None  # frees its graph, as the adapter does
        self.algorithm_adapter.end_backward()
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a batch; of the batch that algorithms have changed in a step of the training."""
        if not self._is_training_step:
            return super().compute_loss(model, inputs, *args, **kwargs)
        adapter, call = self.algorithm_adapter, self._call
        assert call is not None
        if call.batch is None:  # otherwise an optimizer computes the same batch again
            call.model, call.loaded_labels = model, inputs.get("labels")
            call.returns_outputs = bool(args[0] if args else kwargs.get("return_outputs"))
            call.batch = adapter.begin_batch(inputs)
            _check_rows(inputs, call.batch)
        loss = adapter.compute_loss(call.batch)
        return (loss, adapter.state.outputs) if call.returns_outputs else loss

    def _compute_outputs(self, batch: Mapping[str, Any]) -> Any:
        """Return the model's outputs, or keep the loss that Transformers computes if no algorithm needs them."""
        call = self._call
        assert call is not None
        labels, call.num_items_seen = batch.get("labels"), call.num_items
        self.algorithm_adapter.state.loss_share = self._loss_share()
        is_soft = self._transformer is not None and are_probabilities(labels, self._transformer)
        if call.num_items is not None and isinstance(labels, Tensor) and (is_soft or labels is not call.loaded_labels):
            # Transformers has counted the labels of all batches of the step as they were loaded.
            counted = call.loaded_labels != IGNORED
            counts = labels.sum(-1) > 0 if is_soft else labels != IGNORED
            if self._shifts_labels:
                counts = counts[..., 1:]
                counted = counted[..., 1:] if getattr(self, "_loss_shifts_labels", False) else counted
            call.num_items_seen = call.num_items * counts.sum() / counted.sum()
        hides_labels = is_soft or (self._may_skip_loss and self._correct_loss.is_plain)
        call.seen_labels = None if hides_labels else labels
        if hides_labels:
            return self._split().forward({name: value for name, value in batch.items() if name != "labels"})
        if self._needs_outputs:
            return self._split().forward(batch)
        call.loss, outputs = self._host_loss(batch, return_outputs=call.returns_outputs)
        return outputs

    def _compute_loss_of(self, outputs: Any, batch: Mapping[str, Any], reduction: str = "mean") -> Tensor:
        """Return the loss as Transformers computes it, also for other labels than the model has seen."""
        call = self._call
        labels: Any = batch.get("labels")
        assert call is not None
        if call.loss is not None:
            return call.loss
        smoothing = getattr(self.algorithm_adapter.state.model, "loss_label_smoothing", 0.0)
        is_mapping, is_changed = isinstance(outputs, Mapping), labels is not call.seen_labels or smoothing > 0
        if is_changed or reduction != "mean":
            if not is_mapping or not isinstance(outputs.get("logits"), Tensor) or labels is None:
                raise TypeError(
                    "Algorithms that change labels need 'labels' in the batch and 'logits' in the model's outputs, got "
                    f"a batch with {sorted(batch)} and outputs {_described(outputs)}. Let the model return its logits "
                    "in a dictionary, with config.return_dict=True and without use_liger_kernel."
                )
            if reduction != "mean":
                return self._task_loss(outputs, labels, reduction, label_smoothing=smoothing)
        with_loss: Any = copy.copy(outputs)
        if is_changed:
            with_loss["loss"] = self._changed_loss(outputs, labels, call.seen_labels, smoothing)
        elif is_mapping and "loss" in outputs:
            with_loss["loss"] = outputs["loss"].clone()  # Transformers scales it in place
        # Transformers, or a subclass of its Trainer, continues with this loss as with the model's own.
        try:
            final: Tensor = self._split().loss(with_loss, batch)
        except (AttributeError, KeyError) as error:
            raise TypeError(
                f"{type(self).__name__}.compute_loss must use the 'loss' of the model's outputs with algorithms that "
                "change labels after the forward pass, but it uses other outputs. Remove those algorithms."
            ) from error
        return final

    def _changed_loss(self, outputs: Mapping[str, Any], labels: Tensor, seen: Any, label_smoothing: float) -> Tensor:
        """Return what the model would return as its loss for other labels than it has seen."""
        own, correct = outputs.get("loss"), self._correct_loss
        if own is not None and not correct.is_plain:
            # Some models ignore the number of labels in a step, and return the mean of a batch.
            count = self._num_items() if self._uses_num_items else None
            loss = self._task_loss(outputs, labels, num_items=count, label_smoothing=label_smoothing)
            corrected = correct(own, lambda: self._task_loss(outputs, seen, num_items=count), loss)
            if not correct.is_plain:
                return corrected
        return self._task_loss(outputs, labels, num_items=self._num_items(), label_smoothing=label_smoothing)

    def _loss_share(self) -> Any:
        """Return the weight of a mean over the batch in a loss that is divided by the labels of several batches."""
        num_items, labels = self._num_items(), self._call.loaded_labels if self._call else None
        if num_items is None or not isinstance(labels, Tensor):
            return 1.0
        counted = labels != IGNORED
        return (counted[..., 1:] if self._shifts_labels else counted).sum() / num_items

    def _num_items(self) -> Any:
        return self._call.num_items_seen if self._call and self.model_accepts_loss_kwargs else None

    def _task_loss(
        self,
        outputs: Mapping[str, Any],
        labels: Tensor,
        reduction: str = "mean",
        num_items: Any = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return the loss of the model's task; with ``num_items`` the sum over the labels divided by it."""
        loss = task_loss(
            outputs["logits"],
            labels,
            problem_type=getattr(getattr(self._transformer, "config", None), "problem_type", None),
            shift=self._shifts_labels,
            reduction=reduction if num_items is None else "sum",
            label_smoothing=label_smoothing,
        )
        return loss if num_items is None else loss / num_items

    def _split(self) -> SplitStep:
        assert self._call is not None
        return SplitStep(lambda batch: self._host_loss(batch, return_outputs=False)[0], self._call.model)

    def _host_loss(self, batch: Mapping[str, Any], *, return_outputs: bool) -> tuple[Tensor, Any]:
        """Return the loss as Transformers computes it, and the outputs or None."""
        assert self._call is not None
        result: Any = super().compute_loss(
            self._call.model,
            dict(batch),
            return_outputs=return_outputs,
            num_items_in_batch=self._call.num_items_seen,
        )
        return result if return_outputs else (result, None)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict with the averaged weights, if there are any."""
        with contextlib.nullcontext() if self._has_best_model else self.algorithm_adapter.evaluation():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model with the weights for evaluation."""
        with self._averages():
            super().save_model(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        # The averages are in the file of the model, and the state of the algorithms has the training weights then.
        with self._averages():
            if self.args.should_save:
                data, tensors = split_tensors(self.algorithm_adapter.state_dict())
                # Copies, because the format has neither memory that tensors share nor strides.
                copies = {name: one.to("cpu", copy=True).contiguous() for name, one in tensors.items()}
                save_file(copies, Path(output_dir) / STATE_FILE, {"data": json.dumps(data)})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        file = Path(resume_from_checkpoint) / STATE_FILE
        if not file.is_file():
            raise ValueError(
                "resume_from_checkpoint must be a complete checkpoint of a training with algorithms, but "
                f"{resume_from_checkpoint} has no {STATE_FILE}. Load its weights into the model before you create the "
                "Trainer, and start a new training."
            )
        with safe_open(file, "pt") as saved:
            tensors = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118  (no mapping)
            self.algorithm_adapter.load_state_dict(join_tensors(json.loads(saved.metadata()["data"]), tensors))
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._has_best_model = True

    @contextlib.contextmanager
    def _averages(self) -> Iterator[None]:
        """A context in which the model has the averages of an algorithm; Transformers switches the optimizers."""
        state = self.algorithm_adapter.state
        with contextlib.ExitStack() as stack:
            for algorithm in () if self._has_best_model else state.algorithms:
                block = algorithm.evaluation_weights(state)
                if block is not None:
                    stack.enter_context(block)
            yield

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log values, and with the loss of the training the latest values that algorithms have logged."""
        if "loss" in logs:
            for name, value in self._logged.items():
                logs[name] = value.item() if isinstance(value, Tensor) else value
            self._logged.clear()
        super().log(logs, *args, **kwargs)

    def _begin_fit(self, train_dataloader: Any) -> None:
        adapter = self.algorithm_adapter
        self._has_best_model = False
        if not self.state.global_step:
            adapter.state.timestamp = Timestamp()  # another training of the same Trainer starts from the beginning
        # Accelerate wraps the optimizer.
        adapter.begin_fit(self.optimizer.optimizer, **self._training(train_dataloader))
        enter_training_mode(adapter.state.model)
        (self.optimizer.optimizer,) = adapter.optimizers
        if adapter.computes_again:
            _pass_closure(self.optimizer.optimizer, self._make_closure)

    def _training(self, loader: Any) -> dict[str, Any]:
        """Return the training data and the length of the training, as far as they are known."""
        args, batches = self.args, length_of(loader)
        steps = None if batches is None else -(-batches // args.gradient_accumulation_steps)
        duration = f"{int(args.num_train_epochs)}ep"
        if args.max_steps > 0:
            duration = f"{args.max_steps}ba"
        elif args.num_train_epochs % 1:
            duration = f"{math.ceil(args.num_train_epochs * (steps or 0))}ba"
        return {"max_duration": duration, "train_dataloader": loader, "dataloader_len": steps}

    def _make_closure(self) -> Callable[[], Tensor | None]:
        """Return a function that computes the gradients of the last batch again, from its second call on."""
        is_computed = True

        def compute() -> Tensor | None:
            nonlocal is_computed
            if is_computed:  # by training_step
                is_computed = False
                return None
            loss = self._compute_gradients()
            if self.args.max_grad_norm:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            self.algorithm_adapter.end_gradients()
            return loss

        return compute


def composer_trainer(trainer: type[Trainer]) -> type[ComposerTrainer]:
    """Return a subclass of a Trainer whose objects are given algorithms; see :class:`ComposerTrainer`.

    Args:
        trainer: ``transformers.Trainer`` or a subclass of it, such as ``Seq2SeqTrainer`` or one of TRL's.

    Raises:
        TypeError: ``trainer`` is not a subclass of ``transformers.Trainer``.
        ValueError: It has algorithms already.

    Example:
        >>> from transformers import Seq2SeqTrainer
        >>> composer_trainer(Seq2SeqTrainer).__name__
        'ComposerSeq2SeqTrainer'
    """
    if not isinstance(trainer, type) or not issubclass(trainer, Trainer):
        raise TypeError(
            f"trainer must be transformers.Trainer or a subclass, got {trainer!r}. Write "
            "composer_trainer(Trainer)(model=..., args=..., algorithms=[...])."
        )
    if issubclass(trainer, ComposerTrainer):
        raise ValueError(  # noqa: TRY004 (it is a Trainer)
            f"trainer must not have algorithms yet, got {trainer.__name__}. Pass all of them in algorithms=."
        )
    return type(f"Composer{trainer.__name__}", (ComposerTrainer, trainer), {"__doc__": ComposerTrainer.__doc__})


class _Call:
    """A call of ``training_step``, and the labels and the loss of its batch."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> None:
        self.model, self.inputs = model, inputs
        self.num_items = self.num_items_seen = num_items
        self.batch: Any = None
        self.loaded_labels: Any = None
        self.seen_labels: Any = None
        self.loss: Tensor | None = None
        self.returns_outputs = False


class _Events(TrainerCallback):  # type: ignore[misc]
    """Calls the adapter at the events of the training."""

    def __init__(self, trainer: ComposerTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        self._trainer._begin_fit(kwargs["train_dataloader"])  # noqa: SLF001

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        if self._has_all_steps():
            self._trainer.algorithm_adapter.end_epoch()  # resumed from a checkpoint of the last step of an epoch
        self._trainer.algorithm_adapter.begin_epoch()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._trainer.algorithm_adapter.end_gradients()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer.algorithm_adapter.end_step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._has_all_steps() or not control.should_training_stop:
            self._trainer.algorithm_adapter.end_epoch()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._trainer.algorithm_adapter.end_fit()

    def _has_all_steps(self) -> bool:
        """Return whether the clock has counted all steps of the epoch."""
        state = self._trainer.algorithm_adapter.state
        steps = state.dataloader_len
        return steps is not None and state.timestamp.count(TimeUnit.BATCH, in_epoch=True) >= steps


def _pass_closure(optimizer: Optimizer, make_closure: Callable[[], Callable[[], Any]]) -> None:
    """Let an optimizer step with a closure, although its caller passes None."""

    def step(closure: object) -> Any:  # noqa: ARG001 (required as by the method; Accelerate passes None)
        return type(optimizer).step(optimizer, make_closure())

    optimizer.step = step  # type: ignore[assignment, method-assign]


def _check_host(trainer: Trainer) -> None:
    """Raise for trainings that algorithms cannot follow."""
    args, model = trainer.args, trainer.model
    unsupported = {
        "model_init=": (trainer.model_init is not None, "It creates other models later. Pass model="),
        "auto_find_batch_size=True": (args.auto_find_batch_size, "It repeats steps. Set per_device_train_batch_size"),
        "DeepSpeed": (trainer.is_deepspeed_enabled, "It replaces optimizer and weights. Train with torchrun (DDP)"),
        "FSDP": (trainer.is_fsdp_enabled, "It replaces the weights. Train with torchrun (DDP)"),
        "several GPUs in one process": (args.n_gpu > 1, "Start one process for each GPU with torchrun"),
        "use_legacy_prediction_loop=True": (getattr(args, "use_legacy_prediction_loop", False), "Remove it"),
        "a compiled model": (hasattr(model, "_orig_mod"), "Pass the model itself, and torch_compile=True"),
        "a wrapped model": (
            isinstance(model, (DataParallel, DistributedDataParallel)),
            "Pass the model itself, which Transformers wraps after its layers have been replaced",
        ),
    }
    for what, (is_set, remedy) in unsupported.items():
        if is_set:
            raise ValueError(f"Algorithms in Transformers' Trainer do not work with {what}. {remedy}.")


def _check_algorithms(trainer: ComposerTrainer) -> None:
    """Raise for algorithms that the arguments of the training contradict."""
    args, adapter = trainer.args, trainer.algorithm_adapter
    needing_gradients = adapter.writers("gradients", Event.AFTER_TRAIN_BATCH)
    if needing_gradients and args.max_grad_norm:
        raise ValueError(
            f"max_grad_norm must be 0 with {needing_gradients[0]}, which must get the gradients before they are "
            f"clipped, got {args.max_grad_norm}. Set max_grad_norm=0 in TrainingArguments, whose default is 1.0, and "
            "clip by the algorithm GradientClipping."
        )
    stepping = adapter.writers("optimizers", Event.AFTER_LOAD)
    if stepping and args.gradient_accumulation_steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps must be 1 with {stepping[0]}, got {args.gradient_accumulation_steps}: its "
            "step computes the gradients of one batch again. Use a larger per_device_train_batch_size."
        )
    if (stepping or needing_gradients) and args.fp16:
        raise ValueError(
            f"fp16 must be False with {(stepping or needing_gradients)[0]}, which does not unscale gradients. Use "
            "bf16=True."
        )
    needing = adapter.needs_outputs
    of_trl = [one for one in type(trainer).__mro__ if one.__module__.startswith("trl.") and "compute_loss" in vars(one)]
    if needing and of_trl:
        raise ValueError(
            f"{needing[0]} cannot run in {of_trl[0].__name__}, which computes its loss without the logits and labels "
            "that algorithms change after the forward pass. Remove it. SFTConfig has label_smoothing_factor=."
        )
    if args.label_smoothing_factor and needing:
        raise ValueError(
            f"label_smoothing_factor must be 0 with algorithms that change labels, got {args.label_smoothing_factor}. "
            "Use composer.algorithms.LabelSmoothing."
        )


def _check_head(trainer: ComposerTrainer) -> None:
    """Raise for a replaced head that TRL or Liger kernels do not call."""
    modules = [*trainer.model.modules()]
    if not any(isinstance(module, cf.ChunkedHead) for module in modules):
        return
    codes = [getattr(module.forward, "__code__", None) for module in modules]
    if any("fused_lm_head" in code.co_varnames for code in codes if code is not None):
        name = next(one.__name__ for one in type(trainer).__mro__ if one.__module__.startswith("trl."))
        raise ValueError(
            f"ChunkedCrossEntropy cannot run in {name}, which computes its loss from the head's weight without calling "
            "the head. Remove it: TRL computes the logits in chunks itself, without a z-loss."
        )
    args = trainer.args
    if args.use_liger_kernel and (args.liger_kernel_config or {}).get("fused_linear_cross_entropy", True):
        raise ValueError(
            "use_liger_kernel must be False with ChunkedCrossEntropy, as its loss is computed from the head's weight "
            'without calling the head; or pass liger_kernel_config={"fused_linear_cross_entropy": False}.'
        )


def _uses_num_items(model: PreTrainedModel | None) -> bool:
    """Return whether a model passes the number of labels in a step to Transformers' losses."""
    functions = [inspect.unwrap(vars(cls)["forward"]) for cls in type(model).__mro__ if "forward" in vars(cls)]
    return any("loss_function" in function.__code__.co_names for function in functions)


def _may_skip_loss(trainer: ComposerTrainer) -> bool:
    """Return whether the model can be called without labels, if its loss is never used."""
    is_replaced, model = trainer.algorithm_adapter.writers("batch.target", Event.BEFORE_LOSS), _model_with_loss(trainer)
    # Other models may return no logits; decoders read the labels.
    if not is_replaced or model is None or model.config.is_encoder_decoder:
        return False
    labels = inspect.signature(model.forward).parameters.get("labels")
    return labels is not None and labels.default is None


def _model_with_loss(trainer: ComposerTrainer) -> PreTrainedModel | None:
    """Return the model of Transformers if it computes the loss, and not a function of the user."""
    is_usual = trainer.compute_loss_func is None and trainer.label_smoother is None
    is_own = is_usual and _next_method(trainer, "compute_loss") is Trainer.compute_loss
    return trainer._transformer if is_own else None  # noqa: SLF001


def _next_method(trainer: ComposerTrainer, name: str) -> Any:
    """Return the method that the trainer's classes after ComposerTrainer have."""
    classes = type(trainer).__mro__
    later = classes[classes.index(ComposerTrainer) + 1 :]
    return next(vars(one)[name] for one in later if name in vars(one))


def _described(outputs: Any) -> str:
    return f"with {sorted(outputs)}" if isinstance(outputs, Mapping) else f"of type {type(outputs).__name__}"


def _check_rows(loaded: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Raise an error if algorithms have changed the number of rows that a trainer's own loss compares."""
    before, after = loaded.get("input_ids"), changed.get("input_ids")
    if "labels" in loaded or not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return
    if len(before) != len(after):
        raise ValueError(
            f"An algorithm has changed a batch of {len(before)} rows to {len(after)}. Without labels the loss depends "
            "on the order of the rows, as that of TRL's DPOTrainer, which compares the first half with the second. Set "
            "Alibi(train_sequence_length_scaling=1) and SeqLengthWarmup(truncate=True), and leave out algorithms that "
            "select samples."
        )


unquote_annotations(globals())

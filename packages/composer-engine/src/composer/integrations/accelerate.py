"""Algorithms in a training loop with Hugging Face Accelerate: ``accelerate_algorithms``."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from composer.core import Algorithm, Batch, Event, Time
from composer.core.data.batches import describe_batch
from composer.core.data.spec import length_of
from composer.core.declarations import ServedFields
from composer.core.evaluator import enter_training_mode
from composer.core.hosts.adapter import Adapter, served_fields
from composer.core.saving.saved_state import LoadReport
from composer.functional.signatures import unquote_annotations
from composer.functional.transformers_loss import LossCorrection, logits_of, predicts_next_token, task_loss
from composer.integrations._host import HostAlgorithms, call_model, check_closure

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["AccelerateAlgorithms", "accelerate_algorithms"]

_PRECISIONS = {"no": "fp32", "fp16": "amp_fp16", "bf16": "amp_bf16", "fp8": "amp_fp8"}
_SHARDING = {"DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"}
_in_use: weakref.WeakSet[Accelerator] = weakref.WeakSet()


def accelerate_algorithms(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    algorithms: Algorithm | Iterable[Algorithm],
    *,
    max_duration: Time | str | int,
    loss: Callable[..., Any] | None = None,
    forward: Callable[[nn.Module, Batch], Any] | None = None,
    seed: int = 0,
) -> AccelerateAlgorithms:
    """Run algorithms in a training loop with Accelerate.

    Call it before ``accelerator.prepare``, which must get the same model, optimizer and loader. Algorithms that change
    the model do it now, and the optimizer follows. In the loop, ``algorithms.compute_loss(batch)`` replaces the call of
    the model and the loss; everything else remains: ``accelerator.accumulate``, ``accelerator.backward``,
    ``optimizer.step()`` of the prepared optimizer (also with SAM, without a closure), schedulers, trackers and
    checkpoints. The state of the algorithms is registered for ``accelerator.save_state`` and ``load_state``.

    Args:
        accelerator: The accelerator.
        model: The model, before ``accelerator.prepare``.
        optimizer: Its optimizer, before ``accelerator.prepare``.
        loader: The training data, before ``accelerator.prepare``.
        algorithms: One or several.
        max_duration: The duration of the training: ``"10ep"``, or ``"500ba"`` for steps of the optimizer. At its end
            the algorithms finish; for example SWA writes its averages into the model.
        loss: ``f(outputs, batch) -> loss``. If None, it is the ``loss`` of the outputs; for labels that algorithms have
            changed after the forward pass, as MixUp and LabelSmoothing do, it is computed from the ``"logits"`` of a
            model of Transformers, and other models need a function.
        forward: ``f(model, batch) -> outputs``. If None, a dictionary is passed as keyword arguments, of a tuple or
            list the first item, and anything else as it is.
        seed: The seed of the algorithms' draws, the same in each process.

    Returns:
        The object with ``compute_loss``, ``evaluation`` and ``explain``.

    Raises:
        AlgorithmConflictError: Two of the algorithms cannot work together.
        TypeError: ``max_duration`` is not a length of time.
        ValueError: An algorithm needs something that is not served, the accelerator has algorithms already or shards
            the model, the model or the optimizer is prepared, compiled or wrapped, or the optimizer needs a closure
            while gradients are accumulated.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from composer.algorithms import EMA, LabelSmoothing
        >>> accelerator, model = Accelerator(cpu=True), torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader([(torch.ones(4), 0), (torch.zeros(4), 1)], batch_size=1)
        >>> def loss(outputs, batch):
        ...     return torch.nn.functional.cross_entropy(outputs, batch[1])
        >>> algorithms = accelerate_algorithms(
        ...     accelerator, model, optimizer, loader, [LabelSmoothing(0.1), EMA("10ba")], loss=loss, max_duration="1ep"
        ... )
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for batch in loader:
        ...     with accelerator.accumulate(model):
        ...         accelerator.backward(algorithms.compute_loss(batch))
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> algorithms.state.timestamp.batch
        Time(2, TimeUnit.BATCH)
    """
    _check_not_prepared(accelerator, model, optimizer)
    call = call_model if forward is None else forward
    own, prepared = _OwnLoss(model), dict[str, Any]()
    adapter = Adapter(
        _served(accelerator, serves_labels=loss is not None or own.transformer is not None),
        model,
        algorithms,
        forward=lambda batch: call(prepared["model"], own.seen(batch)),
        loss=own.loss if loss is None else loss,
        seed=seed,
        precision=_PRECISIONS[accelerator.mixed_precision],
        device=accelerator.device,
        log=lambda metrics, step: accelerator.log(dict(metrics), step=step),
        world_size=accelerator.num_processes,
    )
    adapter.prepare(optimizer, max_duration=max_duration, train_dataloader=loader)
    enter_training_mode(model)  # before the loop, which may set other modes
    return AccelerateAlgorithms(
        adapter, accelerator, {"model": model, "optimizer": optimizer, "loader": loader}, prepared
    )


class AccelerateAlgorithms(HostAlgorithms):
    """Algorithms in a training loop with Accelerate; see :func:`.accelerate_algorithms`.

    Args:
        adapter: The adapter, which has replaced layers.
        accelerator: The accelerator.
        given: Model, optimizer and loader, as ``accelerator.prepare`` gets them.
        prepared: Filled with what it returns for them.
    """

    def __init__(
        self, adapter: Adapter, accelerator: Accelerator, given: Mapping[str, object], prepared: dict[str, Any]
    ) -> None:
        super().__init__(adapter)
        self._accelerator, self._given, self._prepared = accelerator, given, prepared
        self._needs_gradients = adapter.writers("gradients", Event.AFTER_TRAIN_BATCH)
        self._has_begun = self._is_at_end = self._has_ended = False
        _in_use.add(accelerator)
        accelerator.register_for_checkpointing(self)
        self._prepare_objects, accelerator.prepare = accelerator.prepare, self._prepare
        if self._needs_gradients:
            accelerator.clip_grad_norm_ = accelerator.clip_grad_value_ = self._raise_on_clipping

    def compute_loss(self, batch: Batch) -> Any:
        """Return the loss of a batch, for ``accelerator.backward``; call it once for each batch of the loader.

        Raises:
            RuntimeError: The model, the optimizer or the loader is not prepared, the batch is of another loader, or
                ``max_duration`` has been reached.
        """
        if len(self._prepared) < len(self._given):
            missing = sorted(self._given.keys() - self._prepared.keys())
            raise RuntimeError(
                f"Pass the same {' and '.join(missing)} to accelerator.prepare as to accelerate_algorithms, before "
                "compute_loss."
            )
        if not self._accelerator.gradient_state.in_dataloader:
            raise RuntimeError(
                "compute_loss must be called in a loop over the loader that accelerator.prepare returned, as the end "
                "of an epoch is unknown otherwise."
            )
        self.adapter.end_backward()
        self._finish_epoch()
        if not self._has_begun:
            self._begin_fit()
        if self._has_ended:
            raise RuntimeError(
                f"The training ended after max_duration={str(self.state.max_duration)!r}. Leave the loop then, or pass "
                "the duration of the loop to accelerate_algorithms."
            )
        self.adapter.begin_epoch()
        self._is_at_end = self._accelerator.gradient_state.end_of_dataloader
        return self.adapter.compute_loss(self.adapter.begin_batch(batch))

    def end_epoch(self) -> None:
        """End an epoch that the loop leaves before the end of the loader."""
        self.adapter.end_backward()
        self._is_at_end = self._has_begun and self.adapter.is_in_epoch
        self._finish_epoch()

    def end_fit(self) -> None:
        """End the training before ``max_duration``, for example by early stopping."""
        if not self._has_ended:
            self.adapter.end_backward()
            self._has_ended = True
            self.adapter.end_fit()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> LoadReport:
        """Load what ``state_dict`` returned; ``load_state`` calls it.

        Raises:
            StateMismatchError: The state does not fit, and nothing has been loaded.
        """
        report = super().load_state_dict(state_dict)
        self._has_begun = self._is_at_end = self._has_ended = False
        return report

    def _prepare(self, *objects: Any, **options: Any) -> Any:
        """Call ``accelerator.prepare``, until it has got the model, the optimizer and the loader."""
        results = self._prepare_objects(*objects, **options)
        for given, prepared in zip(objects, results if len(objects) > 1 else [results], strict=True):
            self._prepared.update({name: prepared for name, own in self._given.items() if given is own})
        if len(self._prepared) == len(self._given):
            self._accelerator.prepare = self._prepare_objects
            self._step_optimizer = self._prepared["optimizer"].step
            self._prepared["optimizer"].step = self._step
        return results

    def _begin_fit(self) -> None:
        """Run the events before the first batch, after weights and state have been loaded."""
        length, steps = length_of(self._prepared["loader"]), self._accelerator.gradient_accumulation_steps
        self.adapter.begin_fit(
            train_dataloader=self._prepared["loader"],
            dataloader_len=None if length is None else math.ceil(length / steps),
        )
        (self._prepared["optimizer"].optimizer,) = self.adapter.optimizers  # which algorithms may have wrapped
        self._has_begun = True
        self._has_ended = self._is_over()

    def _step(self, closure: None = None) -> None:
        """Replace ``step`` of the prepared optimizer, which does nothing until the gradients are complete."""
        if closure is not None:
            raise TypeError("optimizer.step must be called without a closure; if it needs one, the algorithms pass it.")
        self._end_backward_before_step()
        if self._accelerator.sync_gradients:
            if self.adapter.computes_again:
                self._step_optimizer(self.adapter.closure(self._accelerator.backward))
            else:
                if self._needs_gradients:
                    self._accelerator.unscale_gradients(self._prepared["optimizer"])
                self.adapter.end_gradients()
                self._step_optimizer()
            self.adapter.end_step()
        self._finish_epoch()
        if self._is_over():
            self.end_fit()

    def _finish_epoch(self) -> None:
        if self._is_at_end:
            self._is_at_end = False
            self.adapter.end_epoch()

    def _is_over(self) -> bool:
        duration = self.state.max_duration
        return duration is not None and self.state.has_reached(duration)

    def _raise_on_clipping(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"{self._needs_gradients[0]} must get the gradients before they are clipped: remove the calls of "
            "accelerator.clip_grad_norm_ and clip_grad_value_, and clip by the algorithm GradientClipping."
        )


def _check_not_prepared(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> None:
    if accelerator in _in_use:
        raise ValueError(
            "accelerator has algorithms already: call accelerate_algorithms once, with all algorithms in one list."
        )
    kind = accelerator.distributed_type.value
    if kind in _SHARDING:
        raise ValueError(f"accelerator must train the complete model in each process, with DDP if several, got {kind}.")
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    for name, given in objects.items():
        is_prepared = hasattr(given, "_is_accelerate_prepared") or hasattr(given, "_orig_mod")  # or compiled
        if is_prepared or isinstance(given, DistributedDataParallel):
            raise ValueError(
                f"{name} must not be prepared, compiled or wrapped yet, got {type(given).__name__}: call "
                "accelerate_algorithms before accelerator.prepare, which also compiles (dynamo_backend=)."
            )
    check_closure(optimizer, _reason_against_closures(accelerator))


def _reason_against_closures(accelerator: Accelerator) -> str | None:
    steps = accelerator.gradient_accumulation_steps
    if steps > 1:
        return f"gradient_accumulation_steps={steps}"
    return "mixed_precision='fp16'" if accelerator.scaler is not None else None


def _served(accelerator: Accelerator, *, serves_labels: bool) -> ServedFields:
    """Return what is served: less if a step cannot be computed twice, or a loss not for other labels."""
    host, unserved = "Accelerate", dict[Event, set[str]]()
    if not serves_labels:
        host += " without loss="
        unserved[Event.BEFORE_LOSS] = unserved[Event.AFTER_LOSS] = {"batch", "batch.target"}
    if reason := _reason_against_closures(accelerator):
        host += f" with {reason}"
        unserved[Event.AFTER_LOAD] = {"optimizers"}
    return served_fields(host, not_writable={"train_dataloader"}, not_writable_at=unserved)


class _OwnLoss:
    """The loss that a model computes itself; for labels that algorithms have changed, as Transformers computes it."""

    def __init__(self, model: Any) -> None:
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of adapters of PEFT
        is_transformer = any(cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__)
        self.transformer: Any = model if is_transformer else None
        self._shifts = is_transformer and predicts_next_token(model)
        self._labels: Any = None
        self._correct = LossCorrection()

    def seen(self, batch: Batch) -> Batch:
        """Keep the labels of the forward pass, and return the batch."""
        self._labels = batch.get("labels") if isinstance(batch, Mapping) else None
        return batch

    def loss(self, outputs: Any, batch: Batch, reduction: str = "mean") -> Any:
        """Return the loss of the outputs."""
        own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if own is not None and reduction == "mean" and labels is self._labels:
            return own
        if self.transformer is None or labels is None:
            raise ValueError(
                "The model must return its loss, or a function loss=f(outputs, batch, reduction='mean') compute it, "
                f"got {type(outputs).__name__} for the batch {describe_batch(batch)}."
            )
        compute = functools.partial(
            task_loss,
            logits_of(outputs),
            problem_type=getattr(self.transformer.config, "problem_type", None),
            shift=self._shifts,
            reduction=reduction,
        )
        loss, seen = compute(labels), self._labels
        return self._correct(own, lambda: compute(seen), loss) if reduction == "mean" else loss


unquote_annotations(globals())

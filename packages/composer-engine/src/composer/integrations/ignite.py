"""Algorithms in an engine of PyTorch-Ignite: ``attach_algorithms``."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from composer.core import Algorithm, Batch, Event, Time, Timestamp
from composer.core.data.batches import batch_get
from composer.core.declarations import ServedFields
from composer.core.evaluator import enter_training_mode
from composer.core.hosts.adapter import Adapter, served_fields
from composer.functional.signatures import unquote_annotations
from composer.integrations._host import HostAlgorithms, call_model, check_closure

if TYPE_CHECKING:
    from ignite.engine import Engine

__all__ = ["IgniteAlgorithms", "attach_algorithms"]


def attach_algorithms(
    engine: Engine,
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Any],
    algorithms: Algorithm | Iterable[Algorithm],
    *,
    max_duration: Time | str | int | None = None,
    seed: int = 0,
) -> IgniteAlgorithms:
    """Run algorithms in an engine of PyTorch-Ignite.

    Call it before handlers are added and weights are loaded. Algorithms that change the model do it now, and the
    optimizer follows. An engine of ``create_supervised_trainer`` needs no other change: its process function is
    replaced by one with the same settings. A process function of the user remains, and computes the loss by
    ``algorithms.compute_loss(batch)``. What algorithms log is in ``engine.state.metrics``.

    Args:
        engine: The engine that trains.
        model: The model that the engine trains.
        optimizer: Its optimizer.
        loss_fn: ``f(y_pred, y) -> loss``, the loss function of the engine.
        algorithms: One or several.
        max_duration: The duration of the training in steps of the optimizer, such as ``"500ba"``, if it is known. Only
            the layers of GyroDropout depend on it before the engine runs, from when on the engine's duration is used.
        seed: The seed of the algorithms' draws, the same in each process.

    Returns:
        The object with ``attach_evaluator``, ``explain``, and the state for ``Checkpoint``.

    Raises:
        AlgorithmConflictError: Two of the algorithms cannot work together.
        ValueError: An algorithm needs something that is not served, the engine has algorithms already or was created
            for another model, optimizer or loss, the model is compiled or wrapped while algorithms replace its layers,
            or the optimizer needs a closure while gradients are accumulated.

    Example:
        >>> import torch
        >>> from ignite.engine import create_supervised_trainer
        >>> from composer.algorithms import EMA, MixUp
        >>> model, loss_fn = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = create_supervised_trainer(model, optimizer, loss_fn)
        >>> algorithms = attach_algorithms(trainer, model, optimizer, loss_fn, [MixUp(), EMA("10ba")])
        >>> _ = trainer.run([(torch.ones(2, 4), torch.tensor([0, 1]))], max_epochs=3)
        >>> algorithms.state.timestamp.batch
        Time(3, TimeUnit.BATCH)
    """
    from ignite import distributed  # noqa: PLC0415  (imported where it is used)

    process = engine._process_function  # noqa: SLF001  (it is what this module replaces)
    is_attached = isinstance(getattr(process, "__self__", None), IgniteAlgorithms)
    if is_attached:
        raise ValueError("engine has algorithms already: call attach_algorithms once, with all of them in one list.")
    supervised = _Supervised.of(process, {"model": model, "optimizer": optimizer, "loss_fn": loss_fn})
    check_closure(optimizer, _reason_against_closures(supervised))
    bare = _unwrapped(model)
    forward: Callable[..., Any] = supervised.forward if supervised else functools.partial(call_model, model)
    loss = _loss_of_batch(loss_fn)
    if supervised and supervised.is_amp:
        forward, loss = torch.autocast("cuda")(forward), torch.autocast("cuda")(loss)
    adapter = Adapter(
        _served(supervised),
        bare,
        algorithms,
        forward=forward,
        loss=loss,
        seed=seed,
        precision="amp_fp16" if supervised and supervised.is_amp else "fp32",
        device=next((weight.device for weight in bare.parameters()), "cpu"),
        log=lambda metrics, _: engine.state.metrics.update(metrics),
        world_size=distributed.get_world_size(),
    )
    surgery = adapter.writers("model", Event.INIT)
    if surgery and bare is not model:
        raise ValueError(
            f"model must not be compiled or wrapped yet, got {type(model).__name__}: {surgery[0]} replaces layers. "
            "Call its function of composer.functional before, and remove it from the algorithms."
        )
    adapter.prepare(optimizer, max_duration=max_duration)
    return IgniteAlgorithms(adapter, engine, model, optimizer, supervised)


class IgniteAlgorithms(HostAlgorithms):
    """Algorithms in an engine of PyTorch-Ignite; see :func:`~composer.integrations.ignite.attach_algorithms`.

    Args:
        adapter: The adapter, which has replaced layers.
        engine: The engine that trains.
        model: The model that the engine trains.
        optimizer: Its optimizer.
        supervised: The settings of an engine of ``create_supervised_trainer``; None for a process function of the user.
    """

    def __init__(
        self, adapter: Adapter, engine: Engine, model: nn.Module, optimizer: Optimizer, supervised: _Supervised | None
    ) -> None:
        from ignite.engine import Events  # noqa: PLC0415

        super().__init__(adapter)
        self._engine, self._model, self._supervised = engine, model, supervised
        self._has_begun = self._is_processing = False
        self._process = self._update if supervised else engine._process_function  # noqa: SLF001
        engine._process_function = self._run_process  # noqa: SLF001
        engine.add_event_handler(Events.STARTED, self._start)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self._end_epoch)
        engine.add_event_handler(Events.COMPLETED, self._complete)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def compute_loss(self, batch: Batch) -> Any:
        """Return the loss of a batch, in a process function of the user.

        The model is called with the first item of a tuple or list, with a dictionary as keyword arguments, or with
        anything else as it is; the loss function with the outputs and the targets.

        Args:
            batch: The batch, on the device of the model.

        Example::

            def process(engine, batch):
                model.train()
                optimizer.zero_grad()
                loss = algorithms.compute_loss(batch)
                loss.backward()
                optimizer.step()
                return loss.item()
        """
        self.adapter.end_backward()
        return self.adapter.compute_loss(self.adapter.begin_batch(batch))

    def attach_evaluator(self, evaluator: Engine) -> None:
        """Let an engine run with the averaged weights, if there are any, from its start to after its last handler.

        So a ``Checkpoint`` that is a handler of the evaluator saves the weights that were evaluated. The training
        weights are restored at the end of its ``run``, also after an error.

        Raises:
            ValueError: It is the engine that trains, or was attached already.
        """
        run = evaluator.run
        if evaluator is self._engine or hasattr(run, "__wrapped__"):
            raise ValueError("evaluator must be an engine that does not train, and be attached once.")

        @functools.wraps(run)
        def run_averaged(*args: Any, **options: Any) -> Any:
            with self.evaluation():
                return run(*args, **options)

        evaluator.run = run_averaged

    def _start(self) -> None:
        self._has_begun = False

    def _begin_fit(self) -> None:
        """Run the events before the first batch, after weights and state have been loaded."""
        run, accumulated = self._engine.state, self._accumulated
        if run.iteration == 1 and not self._is_loaded:
            self.state.timestamp = Timestamp()  # the engine starts, perhaps again
        batches = int(self.state.timestamp.batch)
        if (run.iteration == 1 and batches) or (run.iteration > accumulated and not batches):
            raise RuntimeError(
                f"The engine is at iteration {run.iteration}, but the algorithms are at batch {batches}. Save and load "
                "both in one Checkpoint: to_save={'trainer': engine, 'algorithms': algorithms, ...}."
            )
        length = run.epoch_length
        self.adapter.begin_fit(
            max_duration=f"{run.max_epochs}ep" if run.max_epochs else f"{math.ceil(run.max_iters / accumulated)}ba",
            train_dataloader=run.dataloader,
            dataloader_len=None if length is None else math.ceil(length / accumulated),
        )
        enter_training_mode(self.state.model)
        self._has_begun, self._is_loaded = True, False

    @property
    def _accumulated(self) -> int:
        return self._supervised.gradient_accumulation_steps if self._supervised else 1

    def _run_process(self, engine: Engine, batch: Batch) -> Any:
        """Replace the process function of the engine."""
        if not self._has_begun:
            self._begin_fit()
        self.adapter.begin_epoch()
        self._is_processing = True
        try:
            output = self._process(engine, batch)
            self.adapter.end_backward()
        finally:
            self._is_processing = False
        # Before the handlers of EPOCH_COMPLETED, so that a checkpoint there is one of the next epoch.
        if engine.state.epoch_length and not engine.state.iteration % engine.state.epoch_length:
            self._end_epoch()
        return output

    def _update(self, engine: Engine, batch: Batch) -> Any:
        """Compute and process the loss as the process function of ``create_supervised_trainer``."""
        settings = self._supervised
        assert settings is not None
        accumulated, iteration = settings.gradient_accumulation_steps, engine.state.iteration
        (optimizer,) = self.adapter.optimizers
        if not (iteration - 1) % accumulated:
            optimizer.zero_grad()
        self._model.train()
        prepared = settings.prepare_batch(batch, device=settings.device, non_blocking=settings.non_blocking)
        loss = self.adapter.compute_loss(self.adapter.begin_batch(prepared))
        state = self.adapter.state
        y_pred, (x, y) = state.outputs, state.batch
        settings.backward(loss)
        self.adapter.end_backward()
        if not iteration % accumulated:
            if self.adapter.computes_again:
                optimizer.step(self.adapter.closure(settings.backward))
            else:
                settings.step(optimizer)
            if self.adapter.is_in_step:  # the scaler has skipped the step, whose hooks have not run
                self.adapter.end_step()
        return settings.output_transform(x, y, y_pred, loss)

    def _before_step(self, *_: object) -> None:
        if not self._is_processing:
            return
        self._end_backward_before_step()
        if not self.adapter.computes_again:
            self.adapter.end_gradients()

    def _after_step(self, *_: object) -> None:
        if self._is_processing:
            self.adapter.end_step()

    def _end_epoch(self) -> None:
        """Run the events at the end of an epoch, unless they have run."""
        if self._has_begun and self.adapter.is_in_epoch:
            self.adapter.end_epoch()

    def _complete(self) -> None:
        if self._has_begun:
            self._has_begun = False
            self.adapter.end_fit()


@attrs.define
class _Supervised:
    """The settings of an engine of ``create_supervised_trainer``, from the closure of its process function."""

    model: nn.Module
    optimizer: Optimizer
    loss_fn: Callable[..., Any]
    prepare_batch: Callable[..., Any]
    model_transform: Callable[[Any], Any]
    output_transform: Callable[..., Any]
    device: torch.device | str | None = None
    non_blocking: bool = False
    gradient_accumulation_steps: int = 1
    model_fn: Callable[[nn.Module, Any], Any] = lambda model, x: model(x)
    scaler: torch.amp.GradScaler | None = None
    is_amp: bool = False

    @classmethod
    def of(cls, process: Any, given: Mapping[str, Any]) -> _Supervised | None:
        """Return the settings; None for a process function of the user.

        Raises:
            ValueError: The engine uses something else than what is given, or apex or a TPU.
        """
        kind = getattr(process, "__qualname__", "").removesuffix(".<locals>.update")
        if getattr(process, "__module__", None) != "ignite.engine":
            return None
        if kind not in {"supervised_training_step", "supervised_training_step_amp"}:
            raise ValueError(f"engine must train without apex and TPUs, got one of ignite.engine.{kind}.")
        settings = inspect.getclosurevars(process).nonlocals
        for name, value in given.items():
            if settings[name] is not value:
                raise ValueError(f"{name} must be the one that the engine was created with, got another.")
        known = {field.name for field in attrs.fields(cls)}
        return cls(**{name: value for name, value in settings.items() if name in known}, is_amp=kind.endswith("_amp"))

    def forward(self, batch: Batch) -> Any:
        """Return ``y_pred``."""
        return self.model_transform(self.model_fn(self.model, batch[0]))

    def backward(self, loss: Any) -> None:
        """Compute the gradients of a batch."""
        loss = loss / self.gradient_accumulation_steps if self.gradient_accumulation_steps > 1 else loss
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, optimizer: Optimizer) -> None:
        """Step the optimizer, with unscaled gradients."""
        if self.scaler is None:
            optimizer.step()
            return
        self.scaler.unscale_(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()


def _reason_against_closures(supervised: _Supervised | None) -> str | None:
    if supervised is None:
        return "a process function of your own"
    if supervised.gradient_accumulation_steps > 1:
        return f"gradient_accumulation_steps={supervised.gradient_accumulation_steps}"
    return None if supervised.scaler is None else "a GradScaler"


def _served(supervised: _Supervised | None) -> ServedFields:
    """Return what is served; optimizers cannot be replaced where a batch cannot be computed again."""
    reason = _reason_against_closures(supervised)
    return served_fields(
        f"Ignite with {reason}" if reason else "Ignite",
        not_writable={"train_dataloader"},
        not_writable_at={Event.AFTER_LOAD: {"optimizers"}} if reason else None,
    )


def _loss_of_batch(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``f(outputs, batch)``, with ``reduction`` if the loss function has it as argument or attribute."""

    def loss(outputs: Any, batch: Batch) -> Any:
        return loss_fn(outputs, batch_get(batch, 1))

    def loss_with_reduction(outputs: Any, batch: Batch, reduction: str = "mean") -> Any:
        if reduction == "mean":
            return loss_fn(outputs, batch_get(batch, 1))
        if isinstance(loss_fn, nn.Module):
            other: Any = copy.copy(loss_fn)
            other.reduction = reduction
            return other(outputs, batch_get(batch, 1))
        return loss_fn(outputs, batch_get(batch, 1), reduction=reduction)

    is_module = isinstance(loss_fn, nn.Module)
    has_reduction = hasattr(loss_fn, "reduction") if is_module else "reduction" in inspect.signature(loss_fn).parameters
    return loss_with_reduction if has_reduction else loss


def _unwrapped(model: nn.Module) -> nn.Module:
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        return _unwrapped(model.module)
    return _unwrapped(getattr(model, "_orig_mod")) if hasattr(model, "_orig_mod") else model  # noqa: B009


unquote_annotations(globals())

"""Algorithms in Lightning: a callback for its Trainer, and an object for a loop with Fabric."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from composer.algorithms import GradientClipping
from composer.core import Adapter, Batch, Event, Precision, SplitStep, Timestamp, batch_get, served_fields
from composer.core.evaluator import enter_training_mode, evaluation_weights
from composer.core.event import STEP_EVENTS
from composer.core.optimizers import wants_closure
from composer.core.planning import check_served
from composer.core.step import replaced_method
from composer.functional.signatures import unquote_annotations
from composer.integrations._host import HostAlgorithms
from composer.integrations._lightning_modules import callable_children, first_called, reject_call

if TYPE_CHECKING:
    from lightning import Fabric, LightningModule, Trainer

    from composer.core import Algorithm, LoadReport, Time

__all__ = ["ComposerCallback", "FabricAlgorithms"]

_SERVED = served_fields("Lightning", not_readable={"losses"}, not_writable={"train_dataloader"})
_SERVED_IN_FABRIC = served_fields("Lightning Fabric", not_writable={"train_dataloader"})
_SERVED_MANUALLY = served_fields(
    "Lightning with automatic_optimization=False",
    not_run={Event.AFTER_LOAD, *STEP_EVENTS} - {Event.BATCH_END, Event.BATCH_CHECKPOINT},
    not_readable={"losses"},
    not_writable={"train_dataloader"},
)
_TRAINING_WEIGHTS = "composer_training_weights"
_PRECISIONS = {
    "16-mixed": Precision.AMP_FP16,
    "bf16-mixed": Precision.AMP_BF16,
    "transformer-engine": Precision.AMP_FP8,
    "transformer-engine-float16": Precision.AMP_FP8,
}


class ComposerCallback(HostAlgorithms, Callback):  # type: ignore[misc]  # Lightning is not installed where types are checked
    """Algorithms in the ``Trainer`` of Lightning, for a ``LightningModule`` that needs no change.

    Layers are replaced after ``configure_model``, before weights are loaded and optimizers are made. The function
    ``training_step`` is split into forward pass and loss, if an algorithm needs the outputs. Then code before the call
    of the module runs twice in a step. Validations, tests and predictions use averaged weights, and checkpoints contain
    these as ``state_dict``; the training weights and the state of the algorithms are beside them, for the resume.

    Args:
        algorithms: One or several.
        module: The module, or its name, with whose outputs ``training_step`` computes the loss. If None, it is the
            ``LightningModule`` if ``training_step`` calls ``self(...)``, else the only module that it calls.
        seed: The seed of the algorithms' draws. If None, that of ``lightning.seed_everything``, or else 0.

    Raises:
        AlgorithmConflictError: Two of the algorithms cannot work together.
        ValueError: An algorithm needs what Lightning does not serve.

    Example:
        >>> from composer.algorithms import EMA, BlurPool, MixUp
        >>> callback = ComposerCallback([BlurPool(), MixUp(), EMA("10ba")])
        >>> "before_loss" in str(callback.explain())
        True
    """

    def __init__(
        self,
        algorithms: Algorithm | Iterable[Algorithm],
        *,
        module: nn.Module | str | None = None,
        seed: int | None = None,
    ) -> None:
        self._seed = seed
        self._chosen: Any = module
        self._module: Any = None
        self._trainer: Any = None
        self._split: SplitStep | None = None
        self._step: Callable[[Batch], Any] = _no_step
        self._result: Any = None
        self._batch: Batch = None
        self._is_repeated = self._holds_loaded_weights = self._has_loss = False
        # What to undo at the end of a run, of an evaluation, and of the first batch.
        self._undo, self._evaluation = contextlib.ExitStack(), contextlib.ExitStack()
        self._until_first_loss = contextlib.ExitStack()
        super().__init__(
            Adapter(_SERVED, None, algorithms, forward=self._compute_outputs, loss=self._compute_loss, log=self._log)
        )
        self._needs_outputs = self.adapter.needs_outputs

    def __reduce__(self) -> Any:
        """Reject being sent to another process, where the trained layers and averages would stay."""
        raise TypeError(
            "ComposerCallback cannot be sent to another process, as strategy='ddp_spawn' does: the trained layers and "
            "averages would stay there. Use strategy='ddp'."
        )

    # Hooks of Lightning, in the order in which they are called.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the trainer, and replace methods of the module until the end of the run."""
        self._check(trainer, pl_module)
        adapter, state = self.adapter, self.adapter.state
        state.model, state.device, state.rank = pl_module, trainer.strategy.root_device, trainer.global_rank
        state.precision = _PRECISIONS.get(trainer.precision, Precision.FP32)
        if not adapter.is_prepared:
            state.rank_zero_seed = int(os.environ.get("PL_GLOBAL_SEED", "0") if self._seed is None else self._seed)
        adapter.world_size = trainer.world_size
        self._trainer, self._module = trainer, pl_module
        self._undo.close()
        configure, load, save = pl_module.configure_model, pl_module.on_load_checkpoint, pl_module.on_save_checkpoint

        # Functions, not methods of this object: a copy of the module must not copy the algorithms.
        def configure_model() -> None:
            configure()
            self._prepare(stage)

        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            if stage == "fit" and self.state_key not in checkpoint.get("callbacks", {}):
                raise ValueError(
                    "ckpt_path must be a checkpoint of a training with ComposerCallback, but it has no state of one. "
                    "Load its weights into the module, and start a new training without ckpt_path."
                )
            load(checkpoint)
            if stage == "fit":
                checkpoint["state_dict"] = checkpoint.pop(_TRAINING_WEIGHTS, checkpoint["state_dict"])
            else:
                self._holds_loaded_weights = True  # those that were evaluated; averages of this run are others

        def on_save_checkpoint(checkpoint: dict[str, Any]) -> None:
            self._save_weights(checkpoint)  # Lightning calls no hook of callbacks with save_weights_only=True
            save(checkpoint)

        functions = (configure_model, on_load_checkpoint, on_save_checkpoint)
        replaced: dict[str, Any] = {function.__name__: function for function in functions}
        if stage == "fit":
            self._holds_loaded_weights = False
            if pl_module.automatic_optimization:
                replaced["training_step"] = self._wrapped(pl_module.training_step)
        for name, function in replaced.items():
            self._undo.enter_context(replaced_method(pl_module, name, function))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> LoadReport | None:  # type: ignore[override]
        """Load the state of the algorithms and the clock, in a fit."""
        is_fit = self._trainer is None or self._trainer.state.fn == "fit"
        return self.adapter.load_state_dict(state_dict) if is_fit else None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the weights for evaluation into the checkpoint, and the training weights beside them."""
        self._save_weights(checkpoint)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the training."""
        if self._trainer is None:
            self._reject_late_addition()
        if not trainer.global_step:
            self.adapter.state.timestamp = Timestamp()  # another Trainer with this callback starts from the beginning
        self.adapter.begin_fit(trainer.optimizers, **_length(trainer))
        enter_training_mode(pl_module)
        self._check_closures(trainer)
        if list(self.adapter.optimizers) != trainer.optimizers:
            trainer.strategy.optimizers = list(self.adapter.optimizers)
        self._global_step = trainer.global_step
        if isinstance(self._chosen, str):
            self._chosen = pl_module.get_submodule(self._chosen)

    def _reject_late_addition(self) -> NoReturn:
        raise RuntimeError(
            "ComposerCallback was added to the Trainer after fit began. Pass it to Trainer(callbacks=...)."
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin an epoch with its first batch, as Lightning does not call its hook again after every resume."""
        if self._trainer is None:
            self._reject_late_addition()
        self.adapter.begin_epoch()
        self._is_repeated = False

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the event after a backward pass."""
        if pl_module.automatic_optimization:
            self.adapter.end_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Run the events at which the gradients are complete, unless ``training_step`` has skipped all batches."""
        if pl_module.automatic_optimization and self._has_loss:
            self.adapter.end_gradients()

    def on_train_batch_end(self, trainer: Trainer, *__: Any) -> None:
        """Advance the clock, if optimizers have stepped: once, as several may step in a batch."""
        if trainer.global_step > self._global_step:
            self._global_step, self._has_loss = trainer.global_step, False
            self.adapter.end_step()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the epoch."""
        if self.adapter.is_in_epoch:
            self.adapter.end_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the training."""
        self.adapter.end_fit()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the averaged weights into the model."""
        # Copies of the training weights that were made in inference mode could not be trained.
        with torch.inference_mode(False):
            if not self._holds_loaded_weights:
                self._evaluation.enter_context(self.adapter.evaluation())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the training weights."""
        with torch.inference_mode(False):
            self._evaluation.close()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the training weights and the module's methods."""
        with torch.inference_mode(False):
            self._evaluation.__exit__(type(exception), exception, exception.__traceback__)
        self._undo.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the module's methods."""
        self._undo.close()

    # What these hooks do.

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        """Reject what the algorithms cannot work with, before anything changes."""
        state, strategy, callbacks = self.adapter.state, trainer.strategy, trainer.callbacks
        clips = [repr(one) for one in state.algorithms if isinstance(one, GradientClipping)]
        remedy = "Evaluate a checkpoint by trainer.test(module, ckpt_path=...), with the module that was trained."
        wrong = {
            "A Trainer must have one ComposerCallback, got several. Pass all algorithms to one.": (
                sum(isinstance(one, ComposerCallback) for one in callbacks) > 1
            ),
            f"This ComposerCallback has changed another model, a {type(state.model).__name__}. "
            f"{'Make one for each model.' if trainer.state.fn == 'fit' else remedy}": (
                state.model is not None and state.model is not module
            ),
            "The LightningModule is compiled, so algorithms cannot change its layers and its training_step. "
            "Compile a module inside it, self.network = torch.compile(network).": (
                getattr(module, "_compiler_ctx", None) is not None
            ),
            f"ComposerCallback works with one device and with DDP, got {type(strategy).__name__}. "
            "Use strategy='ddp'.": not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)),
            f"Gradients would be clipped twice, by {', '.join(clips)} and by gradient_clip_val="
            f"{trainer.gradient_clip_val}. Remove one of them.": clips and trainer.gradient_clip_val,
            "training_step takes the iterator of batches, dataloader_iter, so algorithms get no batch. Let it take "
            "a batch, training_step(self, batch, batch_idx).": (
                "dataloader_iter" in inspect.signature(module.training_step).parameters
            ),
        }
        for sentence, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(sentence)
        if not module.automatic_optimization:
            check_served(_SERVED_MANUALLY, self.explain().entries)

    def _check_closures(self, trainer: Trainer) -> None:
        """Reject optimizers that compute a step's loss several times, where Lightning cannot do that."""
        for optimizer in filter(wants_closure, self.adapter.optimizers):
            name = type(optimizer).__name__
            if trainer.accumulate_grad_batches > 1:
                raise ValueError(
                    f"{name} computes the loss of a step twice, but with "
                    f"accumulate_grad_batches={trainer.accumulate_grad_batches} Lightning keeps only the last batch. "
                    "Set accumulate_grad_batches=1."
                )
            if getattr(trainer.precision_plugin, "scaler", None) is not None:
                raise ValueError(_closure_and_scaler(optimizer, trainer.precision))

    def _prepare(self, stage: str) -> None:
        """Let algorithms change the layers."""
        length: dict[str, Any] = {}
        if stage == "fit" and not self.adapter.is_prepared:
            length = {"max_duration": _max_duration(self._trainer)}
            if any("dataloader_len" in entry.reads for entry in self.explain().entries.get(Event.INIT, ())):
                self._trainer.fit_loop.setup_data()
                length = _length(self._trainer)
        # Lightning calls configure_model with the device of the training as default, where the weights are not yet.
        with next((weight.device for weight in self._module.parameters()), torch.device("cpu")):
            self.adapter.prepare(**length)

    def _wrapped(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``training_step`` that runs the events of a batch around the module's own."""

        @functools.wraps(training_step)
        def wrapped(batch: Batch, *arguments: Any) -> Any:
            def step(batch: Batch) -> Any:
                self._result = result = training_step(batch, *arguments)
                loss = result.get("loss") if isinstance(result, Mapping) else result
                if loss is None:
                    raise _SkippedStep
                return loss

            self._step = step
            if not self._is_repeated:
                self._is_repeated = True
                self._batch = self.adapter.begin_batch(batch)
            try:
                loss = self.adapter.compute_loss(self._batch)
                self._has_loss = True
                return {**self._result, "loss": loss} if isinstance(self._result, Mapping) else loss
            except _SkippedStep:
                return self._result
            finally:
                self._step, self._result = _no_step, None

        return wrapped

    def _run_step(self, batch: Batch) -> Any:
        return self._step(batch)  # another one in each step

    def _compute_outputs(self, batch: Batch) -> Any:
        """Return the outputs of the module; or the loss, if no algorithm needs the outputs."""
        if not self._needs_outputs:
            return self._step(batch)
        if self._split is None:
            self._split = SplitStep(self._run_step, self._find_module(batch))
        return self._split.forward(batch)

    def _compute_loss(self, outputs: Any, batch: Batch) -> Any:
        if self._split is None:
            return outputs
        with self._until_first_loss:
            return self._split.loss(outputs, batch)

    def _find_module(self, batch: Batch) -> nn.Module:
        """Return the module whose outputs the loss is computed from."""
        module = self._module
        candidates = {name or "self": one for name, one in callable_children(module)}
        first = first_called(candidates.values(), lambda: self._step(batch), self.adapter.state.device)
        names = {id(one): name for name, one in candidates.items()}
        if first is None:
            raise ValueError(
                f"{type(module).__name__}.training_step calls neither self(...) nor a module with parameters, so the "
                "outputs that algorithms need are unknown. Pass ComposerCallback(..., module=)."
            )
        chosen: nn.Module = first if self._chosen is None else self._chosen
        if not any(one is chosen for one in first.modules()):
            raise ValueError(
                f"training_step calls {names[id(first)]!r} before the module of ComposerCallback, "
                f"a {type(chosen).__name__}, so it would run twice in a step. Call both in forward() and self(...) in "
                "training_step."
            )
        if self._chosen is None and first is not module:
            for other in candidates.values():
                if other is not first and other is not module:
                    handle = other.register_forward_pre_hook(functools.partial(reject_call, names, names[id(first)]))
                    self._until_first_loss.callback(handle.remove)
        return chosen

    def _save_weights(self, checkpoint: dict[str, Any]) -> None:
        """Replace the training weights of a checkpoint by those for evaluation, if there are any."""
        if _TRAINING_WEIGHTS in checkpoint or self.adapter.state.model is None or self._holds_loaded_weights:
            return
        with evaluation_weights(self.adapter.state) as differ:
            if not differ:
                return
            weights = self.adapter.state.model.state_dict()
            averages = {name: one.clone() if isinstance(one, Tensor) else one for name, one in weights.items()}
        if "callbacks" in checkpoint:
            checkpoint[_TRAINING_WEIGHTS] = checkpoint["state_dict"]
        checkpoint["state_dict"] = averages

    def _log(self, metrics: Mapping[str, Any], step: int | None) -> None:
        for logger in self._trainer.loggers if self._trainer is not None else ():
            logger.log_metrics(dict(metrics), step=step)


class FabricAlgorithms(HostAlgorithms):
    """Algorithms in a loop with Lightning Fabric; the construction changes the model.

    Args:
        fabric: The launched Fabric.
        model: The model, before ``fabric.setup``.
        optimizer: Its optimizer, before ``fabric.setup``.
        algorithms: One or several.
        loss: ``f(outputs, batch) -> loss``.
        forward: ``f(model, batch) -> outputs``; the model is called with the samples of the batch if None.
        seed: The seed of the algorithms' draws.

    Attributes:
        model: The model as ``fabric.setup`` returned it, from :meth:`begin_fit` on.
        optimizer: The optimizer that steps, from :meth:`begin_fit` on.

    Raises:
        AlgorithmConflictError: Two of the algorithms cannot work together.
        TypeError: ``optimizer`` is not an optimizer, but for example a list.
        ValueError: An algorithm needs what a loop with Fabric does not serve.

    Example:
        >>> import lightning, torch
        >>> from composer.algorithms import MixUp
        >>> fabric, model = lightning.Fabric(accelerator="cpu"), torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def loss(outputs, batch):
        ...     return torch.nn.functional.cross_entropy(outputs, batch[1])
        >>> algorithms = FabricAlgorithms(fabric, model, optimizer, MixUp(), loss)
        >>> algorithms.begin_fit(max_duration="1ba")
        >>> algorithms.begin_epoch()
        >>> algorithms.step((torch.rand(8, 4), torch.randint(3, (8,)))).shape
        torch.Size([])
    """

    def __init__(
        self,
        fabric: Fabric,
        model: nn.Module,
        optimizer: Optimizer,
        algorithms: Algorithm | Iterable[Algorithm],
        loss: Callable[..., Any],
        *,
        forward: Callable[[nn.Module, Batch], Any] | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be one torch.optim.Optimizer, got {type(optimizer).__name__}. Put the parameters of "
                "several into the groups of one."
            )
        self._fabric, self._forward = fabric, forward
        self.model: Any = model
        self.optimizer: Any = optimizer
        adapter = Adapter(
            _SERVED_IN_FABRIC,
            model,
            algorithms,
            forward=self._compute_outputs,
            loss=loss,
            seed=seed,
            precision=_PRECISIONS.get(fabric.strategy.precision.precision, Precision.FP32),
            device=fabric.device,
            log=fabric.log_dict,
            world_size=fabric.world_size,
        )
        super().__init__(adapter)
        adapter.prepare(optimizer)

    def begin_fit(
        self,
        *,
        max_duration: Time | str | int | None = None,
        train_dataloader: Iterable[Batch] | None = None,
        dataloader_len: int | None = None,
    ) -> None:
        """Set up model and optimizer with Fabric, and begin the training; call it after ``fabric.load``, if any.

        Called again, it begins another training at the start of the clock, with the same model and optimizer; after
        another ``fabric.load`` it continues from there.

        Args:
            max_duration: The duration of the training, such as ``"10ep"``.
            train_dataloader: The training data, as ``fabric.setup_dataloaders`` returns it.
            dataloader_len: The batches of an epoch; the length of the loader if None.

        Raises:
            ValueError: An optimizer computes a step twice, as SAM's does, and gradients are scaled.
        """
        adapter, (own,) = self.adapter, self.adapter.optimizers
        if self.model is adapter.state.model:  # Fabric sets up a model once
            self.model, self.optimizer = self._fabric.setup(self.model, own)
        if not self._is_loaded:
            adapter.state.timestamp = Timestamp()
        self._is_loaded = False
        adapter.begin_fit(max_duration=max_duration, train_dataloader=train_dataloader, dataloader_len=dataloader_len)
        enter_training_mode(adapter.state.model)
        (optimizer,) = adapter.optimizers
        if optimizer is not own:
            self.optimizer = self._fabric.setup_optimizers(optimizer)
        if adapter.computes_again and getattr(self._fabric.strategy.precision, "scaler", None) is not None:
            raise ValueError(_closure_and_scaler(optimizer, self._fabric.strategy.precision.precision))

    def begin_epoch(self) -> None:
        """Begin an epoch, or continue one after a resume."""
        self.adapter.begin_epoch()

    def step(self, batch: Batch) -> Any:
        """Train on a batch: forward pass, loss, ``fabric.backward`` and a step of the optimizer.

        Args:
            batch: A batch, on the device of the model.

        Returns:
            The loss, without its graph.
        """
        adapter, optimizer = self.adapter, self.optimizer
        changed = adapter.begin_batch(batch)

        def compute_gradients() -> Any:
            optimizer.zero_grad()
            loss = adapter.compute_loss(changed)
            self._fabric.backward(loss)
            adapter.end_backward()
            self._fabric.strategy.precision.unscale_gradients(optimizer.optimizer)
            adapter.end_gradients()
            return loss.detach()

        if adapter.computes_again:
            loss = optimizer.step(compute_gradients)
        else:
            loss = compute_gradients()
            optimizer.step()
        adapter.end_step()
        return loss

    def end_epoch(self) -> None:
        """End the epoch."""
        self.adapter.end_epoch()

    def end_fit(self) -> None:
        """End the training."""
        self.adapter.end_fit()

    def _compute_outputs(self, batch: Batch) -> Any:
        return self.model(batch_get(batch, 0)) if self._forward is None else self._forward(self.model, batch)


class _SkippedStep(Exception):  # noqa: N818  (no error: training_step returned None)
    """Ends a step without a loss."""


def _no_step(_: Batch) -> Any:
    raise RuntimeError("ComposerCallback computes losses only within the training_step of Lightning's Trainer.")


def _closure_and_scaler(optimizer: Optimizer, precision: str) -> str:
    return (
        f"{type(optimizer).__name__} computes the loss of a step twice, which Lightning does not do with "
        f"precision={precision!r}. Use 'bf16-mixed' or '32-true'."
    )


def _length(trainer: Trainer) -> dict[str, Any]:
    """Return the length of a training, as arguments of an adapter."""
    batches = trainer.num_training_batches
    return {
        "max_duration": _max_duration(trainer),
        "train_dataloader": trainer.train_dataloader,
        "dataloader_len": None if batches == float("inf") else -(-int(batches) // trainer.accumulate_grad_batches),
    }


def _max_duration(trainer: Trainer) -> str | None:
    """Return the duration of a training that is limited by epochs or steps, whichever is less."""
    # Lightning counts the steps of each optimizer, so with several the number of batches is unknown.
    has_one = trainer.lightning_module.automatic_optimization or len(trainer.optimizers) == 1
    steps, epochs = trainer.max_steps if has_one else -1, trainer.max_epochs
    if epochs in (None, -1):
        return None if steps == -1 else f"{steps}ba"
    batches = trainer.num_training_batches  # inf where it is unknown, 0 before the loader is made
    if steps != -1 and (not batches or steps <= epochs * -(-batches // trainer.accumulate_grad_batches)):
        return f"{steps}ba"
    return f"{epochs}ep"


unquote_annotations(globals())

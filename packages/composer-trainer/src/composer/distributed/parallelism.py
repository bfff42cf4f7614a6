"""Run a model in several processes: each computes a share of the batch, and all take the same step.

:class:`Parallelism` lives as long as the Trainer; the model itself stays the state's. It owns:

- the wrapper: :meth:`~Parallelism.prepare` wraps the model by DDP or shards it by FSDP2, again at each epoch if the
  model or the set of its trained parameters has changed;
- when gradients are reduced: with the backward pass of the last microbatch, or of each;
- the exchange of counts, :class:`~composer.distributed.global_batch.CountExchange`.

What belongs to one batch is in the ``BatchWeights`` that :meth:`~Parallelism.exchange_counts` returns. All processes
call the methods in the order that the class states; in the Trainer, ``trainer/gradients.py`` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from composer.core import State
from composer.distributed.collectives import broadcast_model
from composer.distributed.config import DDPSyncStrategy, ParallelismConfig, has_sync_batchnorm
from composer.distributed.environment import (
    get_data_world_size,
    get_world_size,
    is_connected,
    is_initialized,
    set_tensor_parallel_size,
)
from composer.distributed.global_batch import BatchShare, BatchWeights, CountExchange
from composer.distributed.meta import initialize, is_on_meta
from composer.distributed.process_group import initialize_alone
from composer.distributed.sharding import shard, sharded_alone
from composer.functional.dtensors import is_sharded, local_parts

if TYPE_CHECKING:
    from composer.core.step import Microbatch


class Parallelism:
    """Run a model in all processes: data parallel with DDP, or sharded with FSDP2; unchanged with one process.

    The state's model stays the bare module, which algorithms, metrics and checkpoints use. A loop calls :meth:`prepare`
    once algorithms have changed the model, :meth:`exchange_counts` with each batch, :meth:`begin_microbatch` before the
    forward pass of each microbatch, ``forward`` instead of the model, and :meth:`complete_gradients` after the last
    backward pass of the batch. All processes must call the same methods in the same order; a single one needs only
    :meth:`prepare` and ``forward``, and with FSDP2 and microbatches :meth:`begin_microbatch`.

    A batch consists of the shares of all processes. Gradients are averaged over processes, so that each loss must be
    multiplied by its weight of those that :meth:`exchange_counts` returns: the step then equals that of one process
    with the complete batch, even if the shares have different sizes.

    Args:
        parallelism_config: ``None`` or ``{"ddp": {...}}`` for DDP, see :class:`DDPSettings`; ``{"fsdp": {...}}`` for
            FSDP2, see :class:`~composer.distributed.sharding.FSDPSettings`; ``{"mesh": {...}}``, with ``"fsdp"`` and
            ``"tp"`` as needed, for several kinds of parallelism, see :class:`~composer.distributed.mesh.MeshSettings`
            and :class:`~composer.distributed.mesh.TensorParallelSettings`.
        ddp_sync_strategy: When gradients are reduced.

    Attributes:
        config: The settings, checked.
        forward: The function to call with a batch instead of the model.
        is_connected: Whether there are other processes; known after :meth:`prepare`.
        compile_config: Arguments of ``torch.nn.Module.compile`` for each block of a model that is split; None does not
            compile.
        is_trial: Whether each process computes alone, see :meth:`trial`.

    Raises:
        TypeError: A setting is of the wrong kind.
        ValueError: A setting does not exist, or two contradict each other.

    Example:
        >>> from composer.core import State
        >>> from composer.distributed import BatchShare
        >>> state, parallel = State(nn.Linear(2, 2)), Parallelism()
        >>> parallel.prepare(state)
        >>> weights = parallel.exchange_counts(BatchShare(samples=3))
        >>> parallel.forward(torch.ones(3, 2)).shape, weights.weight()
        (torch.Size([3, 2]), 1.0)
    """

    def __init__(
        self,
        parallelism_config: Mapping[str, Any] | None = None,
        ddp_sync_strategy: DDPSyncStrategy | str | None = None,
    ) -> None:
        self.config = ParallelismConfig.from_arguments(parallelism_config, ddp_sync_strategy)
        self.compile_config: Mapping[str, Any] | None = None
        self.forward: Callable[..., Any] = _not_prepared
        self.is_trial = False
        self.is_connected = False
        # What prepare() has wrapped: the model, and those of its parameters that are trained.
        self._model: nn.Module | None = None
        self._trainable: list[nn.Parameter] = []
        self._needs_equal_number = False  # of microbatches in all processes
        # The wrapper that reduces gradients in the backward pass, None if nothing does, and what it was set to last.
        self._reducing: Any = None
        self._reduces: bool | None = None
        self._exchange: CountExchange | None = None  # with several processes

    def activate(self) -> None:
        """Let the mesh of these settings determine which processes have the same samples, until others do."""
        set_tensor_parallel_size(self.config.layer_size)

    def prepare(self, state: State) -> None:
        """Broadcast the model of rank 0 to all processes, and wrap or shard the state's current model.

        Calling it again has an effect only if the model or the set of its trainable parameters has changed, so that it
        may be called at the start of every epoch. A sharded model stays sharded.

        Args:
            state: The run, with model, optimizers, algorithms, device and precision; with FSDP2, **its model and its
                optimizers are changed in place**.

        Raises:
            ValueError: The processes' models differ in their parameters, or an algorithm with FSDP2 uses different
                layers in each process.
            RuntimeError: There are several processes that are not connected.
        """
        self.activate()
        model: nn.Module = state.model
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if model is self._model and [*map(id, trainable)] == [*map(id, self._trainable)]:
            return
        config = self.config
        if not self.is_connected and is_connected():
            self.is_connected, self._exchange = True, CountExchange(get_world_size(), config.layer_size)
        # The hooks of the last wrapper are removed with it, before those of a new one are added.
        self.forward, self._reducing, self._reduces = model, None, None
        if not is_sharded(model):
            if config.splits_model:
                self._shard(state)
            elif self.is_connected:
                if model is not self._model or not any(one.trains_apart for one in state.algorithms):
                    broadcast_model(model)
                self._wrap(state, is_trained=bool(trainable))
        is_ddp = isinstance(self.forward, nn.parallel.DistributedDataParallel)
        if is_ddp or callable(getattr(self.forward, "set_requires_gradient_sync", None)):
            self._reducing = self.forward
        reduces_each = config.strategy is DDPSyncStrategy.MULTI_AUTO_SYNC
        runs_together = reduces_each or has_sync_batchnorm(model) or is_sharded(model)
        self._needs_equal_number = self.is_connected and runs_together
        # Of the model as it is now, as sharding replaces its parameters.
        self._model = model
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def exchange_counts(self, own: BatchShare, *, usual_elements: int | None = None) -> BatchWeights:
        """Start exchanging the counts of this process's share of a batch, and return the weights of its losses.

        Args:
            own: The counts of this process; its ``seconds`` are those since the last call.
            usual_elements: The number of elements in nearly all batches of each process, the same in all of them. The
                weight of a loss is then known without waiting for other processes, and :meth:`complete_gradients`
                corrects all gradients of other batches.
        """
        exchange = None if self.is_trial else self._exchange
        weights = BatchWeights(own, usual_elements, exchange)
        if exchange is not None:
            exchange.send(own)
        return weights

    def padded(self, microbatches: Sequence[Microbatch], weights: BatchWeights) -> Sequence[Microbatch]:
        """Pad the microbatches and their weights to the maximum number of all processes, with weight 0.

        Only if all processes must run each microbatch together: with FSDP2, SyncBatchNorm, or ``'multi_auto_sync'``.

        Args:
            microbatches: Those of this process.
            weights: What :meth:`exchange_counts` returned.
        """
        if not self._needs_equal_number:
            return microbatches
        lacking = weights.totals().microbatches - len(microbatches)
        return [*microbatches, *[(microbatches[-1][0], 0.0)] * lacking] if lacking > 0 else microbatches

    def begin_microbatch(self, is_last: bool) -> None:
        """Set before a forward pass whether its backward pass reduces gradients: by default only the last does."""
        reduces = is_last or self.config.strategy is DDPSyncStrategy.MULTI_AUTO_SYNC
        if reduces is self._reduces or self._reducing is None:
            return
        self._reduces = reduces
        # What no_sync() of DDP sets, which is a context and cannot span the calls of a step.
        if isinstance(self._reducing, nn.parallel.DistributedDataParallel):
            self._reducing.require_backward_grad_sync = reduces
        else:
            self._reducing.set_requires_gradient_sync(reduces)
            if self.is_trial:
                self._reducing.set_requires_all_reduce(False)

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Compute gradients in each process alone as long as the context lasts, to find out what fits into memory.

        No process waits for another, so that each may fail. The context ends in :meth:`complete_gradients`, as what
        follows may communicate. The gradients must be discarded: they are not those of the batch. A sharded model
        computes with copies of the process's part, and starts over after an error. One process computes as always.
        """
        wrapped = self.forward, self._reducing
        self.is_trial, self._reduces = self.is_connected, None
        if isinstance(self.forward, nn.parallel.DistributedDataParallel):  # which would broadcast the buffers
            self.forward, self._reducing = self.forward.module, None
        alone = contextlib.nullcontext if self._reducing is None else sharded_alone
        try:
            with contextlib.suppress(_EndOfTrial), alone(self._reducing):
                yield
        finally:
            self.is_trial, self._reduces = False, None
            self.forward, self._reducing = wrapped

    def complete_gradients(self, weights: BatchWeights) -> float:
        """Complete the gradients after the last microbatch, with the same result in all processes.

        If a process did not have its usual number of elements, they are multiplied by the usual number of all processes
        divided by the actual one.

        Args:
            weights: What :meth:`exchange_counts` returned.

        Returns:
            That factor, by which the sum of the batch's weighted losses must be multiplied, too; nearly always 1.

        Raises:
            ValueError: As :meth:`~composer.distributed.BatchWeights.totals`.
        """
        if not self.is_connected or self._model is None:
            return 1.0
        if self.is_trial:
            raise _EndOfTrial
        factor = weights.correction()
        if factor != 1:
            # A model may have both DTensors and others, which foreach cannot multiply together.
            with torch.no_grad():
                gradients = local_parts([one.grad for one in self._model.parameters() if one.grad is not None])
                if gradients:
                    torch._foreach_mul_(gradients, factor)
        return factor

    def reduce_mean(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the means of scalars over processes, in one reduction that does not synchronize with a CUDA device.

        For losses multiplied by their weight and the factor of :meth:`complete_gradients`, these are the means over all
        samples.

        Args:
            losses: Scalars by name, with the same names in every process.
        """
        if not losses or not self.is_connected:
            return dict(losses)
        values = torch.stack([loss.detach().reshape(()) for loss in losses.values()])
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        torch.distributed.all_reduce(values)
        return dict(zip(losses, values.div_(get_world_size()).unbind(), strict=True))

    def _shard(self, state: State) -> None:
        """Split the model over processes, in place; a model on the meta device gets its initial values then."""
        config, model = self.config, state.model
        drawing = [type(each).__name__ for each in state.algorithms if each.draws_layers]
        if drawing and config.fsdp is not None and get_data_world_size() > 1:
            raise ValueError(  # gathers of weights would differ
                f"{' and '.join(drawing)} draws in each process which layers a step uses, and with FSDP2 all processes "
                "must use the same ones. Train with DDP, or use all layers; for StochasticDepth, set "
                "stochastic_method='sample'."
            )
        if not is_initialized():
            initialize_alone(state.device)
        has_data = not is_on_meta(model)
        if has_data:
            broadcast_model(model)
        shard(
            model,
            state.optimizers,
            config.fsdp,
            state.device,
            state.precision,
            mesh=config.mesh,
            tensor_parallel=config.tp if config.layer_size > 1 else None,
            compile_config=self.compile_config,
        )
        if not has_data:
            initialize(model, state.device, state.rank_zero_seed)

    def _wrap(self, state: State, *, is_trained: bool) -> None:
        """Wrap the model by DDP, unless nothing of it is trained, or each process trains alone."""
        if not is_trained or any(each.trains_apart for each in state.algorithms):
            return
        forced = self.config.strategy is DDPSyncStrategy.FORCED_SYNC
        settings = attrs.asdict(self.config.ddp)
        settings["find_unused_parameters"] |= forced or any(each.find_unused_parameters for each in state.algorithms)
        # The model has been broadcast, and without device_ids DDP does not move the batch, which is on the device.
        self.forward = nn.parallel.DistributedDataParallel(state.model, init_sync=False, **settings)


class _EndOfTrial(Exception):  # noqa: N818  (no error)
    """Ends a trial after its last backward pass."""


def _not_prepared(*_: Any) -> Any:
    raise RuntimeError("Call Parallelism.prepare(state) before the first forward pass.")

"""How a model is run in several processes: each computes a part of the batch, and all take the same step."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import attrs
import torch
from attrs.validators import instance_of
from torch import Tensor, nn

from composer.distributed.collectives import all_agree, host_group, is_connected, together
from composer.distributed.environment import get_world_size, is_initialized
from composer.distributed.process_group import initialize_alone
from composer.distributed.sharding import FSDPSettings, is_sharded, shard

if TYPE_CHECKING:
    from composer.core import Batch, State

__all__ = ["BatchTotals", "DDPSettings", "DDPSyncStrategy", "Parallelism", "broadcast_buffers", "broadcast_model"]


class DDPSyncStrategy(enum.StrEnum):
    """When the processes' gradients are added up; the result is the same.

    Example:
        >>> DDPSyncStrategy("forced_sync").name
        'FORCED_SYNC'
    """

    SINGLE_AUTO_SYNC = "single_auto_sync"
    """With the last microbatch, while its backward pass goes on: what is sent least. The default."""

    MULTI_AUTO_SYNC = "multi_auto_sync"
    """With every microbatch."""

    FORCED_SYNC = "forced_sync"
    """After the last microbatch, by itself; does not look for unused parameters in the graph."""


@attrs.frozen(kw_only=True)
class DDPSettings:
    """What ``torch.nn.parallel.DistributedDataParallel`` is told; the keys of ``parallelism_config["ddp"]``.

    Args:
        find_unused_parameters: Whether a step may leave parameters without a gradient. Algorithms that do so
            (LayerFreezing, StochasticDepth) say it themselves.
        bucket_cap_mb: How much is sent at once, in MiB.
        gradient_as_bucket_view: Whether gradients lie where they are sent from, which saves their size in memory.

    Raises:
        TypeError: A setting is of the wrong kind.
        ValueError: A setting does not exist.

    Example:
        >>> DDPSettings.from_config({"find_unused_parameters": True}).find_unused_parameters
        True
    """

    find_unused_parameters: bool = attrs.field(default=False, validator=instance_of(bool))
    bucket_cap_mb: int | None = attrs.field(default=None, validator=attrs.validators.optional(instance_of(int)))
    gradient_as_bucket_view: bool = attrs.field(default=False, validator=instance_of(bool))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the settings of a dictionary.

        Raises:
            ValueError: It has a key that is none of them.
        """
        known = [field.name for field in attrs.fields(cls)]
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise ValueError(
                f"parallelism_config['ddp'] takes {', '.join(known)}, got {', '.join(map(repr, unknown))}."
            )
        return cls(**config)


@attrs.frozen
class BatchTotals:
    """What all processes together have in a batch.

    Attributes:
        samples: Their samples.
        tokens: Their tokens.
        seconds: The mean of the seconds that each has counted.
        microbatches: The most microbatches that one of them has.
        weight: How much this process's loss counts: its share of the samples times the number of processes.
        stop: Whether some process wants to stop after this batch.

    Example:
        >>> BatchTotals(samples=5, weight=1.2).weight
        1.2
    """

    samples: int
    tokens: int = 0
    seconds: float = 0.0
    microbatches: int = 1
    weight: float = 1.0
    stop: bool = False


class Parallelism:
    """Runs a model in all processes: data parallel by DDP, or sharded by FSDP2; with one process, as it is.

    The state's model stays the bare module, with which algorithms, metrics and checkpoints have to do. A loop calls
    :meth:`prepare` once algorithms have changed the model, :meth:`begin_batch` with each batch,
    :meth:`begin_microbatch` before each forward pass, :attr:`forward` instead of the model, and :meth:`end_batch` when
    the batch's gradients are computed. All processes have to call the same methods in the same order.

    A batch is what all processes have of it together. Gradients are averaged over processes, so that each loss has to
    be multiplied by :attr:`BatchTotals.weight`: the step is then that of one process with the whole batch, even if the
    parts have different sizes.

    Args:
        parallelism_config: ``None`` or ``{"ddp": {...}}`` for DDP, see :class:`DDPSettings`; ``{"fsdp": {...}}`` for
            FSDP2, see :class:`~composer.distributed.sharding.FSDPSettings`.
        ddp_sync_strategy: When gradients are added up.

    Attributes:
        forward: What to call with a batch instead of the model.
        is_connected: Whether there are other processes; known after :meth:`prepare`.
        is_apart: Set it to let each process compute gradients for itself, to be thrown away: to try what fits into
            memory. What is sharded cannot be run apart.

    Raises:
        TypeError: A setting is of the wrong kind.
        ValueError: A setting does not exist, or two contradict each other.

    Example:
        >>> from composer.core import State
        >>> state, parallel = State(nn.Linear(2, 2)), Parallelism()
        >>> parallel.prepare(state)
        >>> parallel.begin_batch(samples=3)
        >>> parallel.forward(torch.ones(3, 2)).shape, parallel.totals().weight
        (torch.Size([3, 2]), 1.0)
    """

    def __init__(
        self,
        parallelism_config: Mapping[str, Any] | None = None,
        ddp_sync_strategy: DDPSyncStrategy | str | None = None,
    ) -> None:
        config = _checked_config(parallelism_config)
        self._fsdp = FSDPSettings.from_config(config["fsdp"]) if "fsdp" in config else None
        self._ddp = DDPSettings.from_config(config.get("ddp", {}))
        self._strategy = _checked_strategy(ddp_sync_strategy)
        if self._fsdp is not None and self._strategy is DDPSyncStrategy.FORCED_SYNC:
            raise ValueError(
                "ddp_sync_strategy='forced_sync' is for DDP, and parallelism_config has 'fsdp'. "
                "Say 'multi_auto_sync', which needs less memory, or 'single_auto_sync', which sends less."
            )
        self.forward: Callable[..., Any] = _not_prepared
        self.is_apart = False
        self.is_connected = False
        self._model: nn.Module | None = None
        self._trainable: list[nn.Parameter] = []
        self._runs_together = False
        self._synced: Any = None
        self._syncs = True
        self._totals: BatchTotals | None = None
        self._counted = 0.0
        self._numbers: list[Tensor] = []
        self._exchange: Any = None

    def prepare(self, state: State) -> None:
        """Make all processes' models equal to that of rank 0, and wrap or shard the model as the state has it now.

        Called again, it does something only if the model is another or other parameters of it are trained: so it may be
        called at every start of an epoch. What is sharded stays so.

        Args:
            state: With model, optimizers, algorithms, device and precision; with FSDP2, **its model and its optimizers
                are changed in place**.

        Raises:
            ValueError: The processes' models differ in their parameters.
            RuntimeError: There are several processes that are not connected.
        """
        model: nn.Module = state.model
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if model is self._model and _are_same(trainable, self._trainable):
            return
        self.is_connected = is_connected()
        self.forward = model
        if self._fsdp is not None and not is_sharded(model):
            self._shard(state, self._fsdp)
        elif self.is_connected and not is_sharded(model):
            broadcast_model(model)
            self._wrap(state)
        self._take_control_of(self.forward)
        is_multi = self._strategy is DDPSyncStrategy.MULTI_AUTO_SYNC
        self._runs_together = is_multi or (self.is_connected and is_sharded(model))
        self._model = model
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def check_microbatch_size(self, size: int | str | None) -> None:
        """Refuse a size of microbatches that processes cannot find together.

        Raises:
            ValueError: It is ``"auto"``, and the model is sharded.
        """
        if size == "auto" and self._fsdp is not None:
            raise ValueError(
                "device_train_microbatch_size='auto' lets each process try by itself, which sharded models cannot: "
                "give a number, or leave out parallelism_config['fsdp']."
            )

    def begin_batch(
        self,
        samples: int,
        tokens: int = 0,
        *,
        counted: float | None = None,
        microbatches: int = 1,
        seconds: float = 0.0,
        stop: bool = False,
    ) -> None:
        """Begin to tell the other processes what this one has of the batch; they are heard by :meth:`totals`.

        Args:
            samples: Its samples.
            tokens: Its tokens.
            counted: What its loss is the mean of, if not of its samples: its tokens that have a target, for one.
            microbatches: In how many parts it computes them.
            seconds: Time to count, if clocks have to agree.
            stop: Whether to stop after this batch.
        """
        if not self.is_connected:
            self._totals = BatchTotals(samples, tokens, seconds, microbatches, 1.0, stop)
            return
        counted = samples if counted is None else counted
        own = torch.tensor([samples, tokens, seconds, microbatches, stop, counted], dtype=torch.float64, device="cpu")
        self._totals, self._counted, self._numbers = (
            None,
            counted,
            [torch.empty_like(own) for _ in range(get_world_size())],
        )
        self._exchange = torch.distributed.all_gather(self._numbers, own, group=host_group(), async_op=True)

    def totals(self) -> BatchTotals:
        """Return what the processes have of the batch together; waits for hosts, never for a device.

        Raises:
            ValueError: No process has anything to train on in this batch.
        """
        if self._totals is None:
            self._exchange.wait()
            numbers = torch.stack(self._numbers)
            samples, tokens, seconds, _, stop, counted = numbers.sum(dim=0).tolist()
            if counted <= 0:
                raise ValueError("No process has a sample (or token, if those are weighed) to train on in this batch.")
            self._totals = BatchTotals(
                samples=int(samples),
                tokens=int(tokens),
                seconds=seconds / len(numbers),
                microbatches=int(numbers[:, 3].max()),
                weight=self._counted * len(numbers) / counted,
                stop=stop > 0,
            )
        return self._totals

    def padded(self, parts: Sequence[tuple[Batch, float]]) -> Sequence[tuple[Batch, float]]:
        """Return microbatches and their shares, as many as the process with the most has; those added have share 0.

        Only where all processes have to run each microbatch together: with FSDP2, and with ``'multi_auto_sync'``.
        """
        if not self.is_connected or not self._runs_together:
            return parts
        lacking = self.totals().microbatches - len(parts)
        return [*parts, *[(parts[-1][0], 0.0)] * lacking] if lacking > 0 else parts

    def begin_microbatch(self, is_last: bool) -> None:
        """Say before a forward pass whether gradients are added up with its backward pass: as a rule with the last."""
        syncs = not self.is_apart and (is_last or self._strategy is DDPSyncStrategy.MULTI_AUTO_SYNC)
        if syncs is self._syncs or self._synced is None:
            return
        self._syncs = syncs
        if isinstance(self._synced, nn.parallel.DistributedDataParallel):
            self._synced.require_backward_grad_sync = syncs
        else:
            self._synced.set_requires_gradient_sync(syncs)

    def end_batch(self) -> None:
        """Finish the gradients after the last microbatch: nothing to do, unless by ``'forced_sync'``."""
        is_forced = self._strategy is DDPSyncStrategy.FORCED_SYNC and not self.is_apart
        if self.is_connected and is_forced and self._model is not None:
            _average_gradients(self._trainable)
            broadcast_buffers(self._model)

    def reduce_mean(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the means over processes of scalars, all in one exchange; on a CUDA device nobody waits for it.

        Of losses that were multiplied by :attr:`BatchTotals.weight`, these are the means over all samples.

        Args:
            losses: Scalars by the same names in every process.
        """
        if not losses or not self.is_connected:
            return dict(losses)
        values = torch.stack([loss.detach().reshape(()) for loss in losses.values()])
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        torch.distributed.all_reduce(values)
        return dict(zip(losses, values.div_(get_world_size()).unbind(), strict=True))

    def _shard(self, state: State, settings: FSDPSettings) -> None:
        if not is_initialized():
            initialize_alone(state.device)
        broadcast_model(state.model)
        shard(state.model, state.optimizers, settings, state.device, state.precision)

    def _wrap(self, state: State) -> None:
        self._synced = None  # the last wrapper's hooks go before new ones come
        is_trained = any(parameter.requires_grad for parameter in state.model.parameters())
        if self._strategy is DDPSyncStrategy.FORCED_SYNC or not is_trained:
            return
        settings = attrs.asdict(self._ddp)
        settings["find_unused_parameters"] |= any(each.find_unused_parameters for each in state.algorithms)
        # Without device_ids, as the batch is on the device already.
        self.forward = nn.parallel.DistributedDataParallel(state.model, init_sync=False, **settings)

    def _take_control_of(self, model: Any) -> None:
        """Remember what can be told when to add up gradients; it does so until it is told otherwise."""
        is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        controlled = model if is_ddp or callable(getattr(model, "set_requires_gradient_sync", None)) else None
        if controlled is not self._synced:
            self._synced, self._syncs = controlled, True


def broadcast_model(model: nn.Module) -> None:
    """Make all processes' weights and buffers equal to those of rank 0.

    Raises:
        ValueError: The models differ in the names, shapes or dtypes of their parameters and buffers.

    Example:
        >>> broadcast_model(nn.Linear(2, 2))
    """
    if not is_connected():
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    looks = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    if not all_agree(looks):
        raise ValueError(
            "The processes have different models: names, shapes or dtypes of parameters or buffers are not the same. "
            "Build and change the model the same way in every process, whatever its rank."
        )
    _broadcast(list(tensors.values()))


def broadcast_buffers(model: nn.Module) -> None:
    """Make all processes' buffers equal to those of rank 0: the running means of BatchNorm, for one.

    Each process computes its own from its part of the batches; evaluation and checkpoints need one.

    Example:
        >>> broadcast_buffers(nn.BatchNorm1d(2))
    """
    if is_connected():
        _broadcast(list(model.buffers()))


def _broadcast(tensors: list[Tensor]) -> None:
    with torch.no_grad():
        together(tensors, lambda flat: torch.distributed.broadcast(flat, 0))


@torch.no_grad()
def _average_gradients(parameters: list[nn.Parameter]) -> None:
    """Average gradients over processes; one that some process lacks is zero there, and stays away if all lack it."""
    has = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8, device="cpu")
    if not len(has):
        return
    torch.distributed.all_reduce(has, op=torch.distributed.ReduceOp.MAX, group=host_group())
    gradients = []
    for parameter, is_there in zip(parameters, has.tolist(), strict=True):
        if is_there:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    world_size = get_world_size()

    def average(flat: Tensor) -> None:
        torch.distributed.all_reduce(flat)
        flat.div_(world_size)

    together(gradients, average)


def _are_same(some: list[nn.Parameter], others: list[nn.Parameter]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _checked_config(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise TypeError(f"parallelism_config must be None or a dictionary, got {type(config).__name__}.")
    given = {name: settings for name, settings in config.items() if settings is not None}
    if "tp" in given:
        raise ValueError("parallelism_config['tp']: tensor parallelism is not supported. Use {'fsdp': {...}}.")
    if len(given) > 1 or set(given) - {"fsdp", "ddp"}:
        raise ValueError(
            "parallelism_config must be None, {'ddp': {...}} or {'fsdp': {...}}, got "
            f"{', '.join(repr(name) for name in given)}."
        )
    for name, settings in given.items():
        if not isinstance(settings, Mapping):
            raise TypeError(f"parallelism_config[{name!r}] must be a dictionary, got {type(settings).__name__}.")
    return given


def _checked_strategy(strategy: DDPSyncStrategy | str | None) -> DDPSyncStrategy:
    if strategy is None:
        return DDPSyncStrategy.SINGLE_AUTO_SYNC
    try:
        return DDPSyncStrategy(strategy.lower())
    except (AttributeError, ValueError):
        raise ValueError(f"ddp_sync_strategy must be one of {', '.join(DDPSyncStrategy)}, got {strategy!r}.") from None


def _not_prepared(*_: Any) -> Any:
    raise RuntimeError("Parallelism.prepare(state) comes before the first forward pass.")

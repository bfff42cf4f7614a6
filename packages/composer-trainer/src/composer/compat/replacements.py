"""Small functions of MosaicML Composer's helpers, for programs that import them under their former names.

``table.toml`` lists the names that are served from this module, and from the others of this package.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import enum
import functools
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeAlias, TypeVar

import attrs
import torch
from torch import nn

from composer.compat.devices import get_device
from composer.core import Event, Interval, State, Time, TimeUnit
from composer.core.saving import randomness
from composer.distributed import (
    FSDPSettings,
    all_gather_object,
    from_rank_zero,
    get_global_rank,
    get_local_rank,
    get_node_rank,
    run_local_rank_zero_first,
)
from composer.foreign.fsdp1 import FSDP1_DEFAULTS
from composer.optim.clock import convert_time
from composer.trainer.reproducibility import seed_all

P = ParamSpec("P")
T = TypeVar("T")

JSON: TypeAlias = str | float | int | list[Any] | dict[str, Any] | None
"""A value that JSON can represent."""

STR_TO_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtypes of weights, by their names in settings."""


def ensure_tuple(x: Any) -> tuple[Any, ...]:
    """Return a tuple of the items of a sequence or of the values of a mapping; other values, and strings, are one item.

    Example:
        >>> ensure_tuple(None), ensure_tuple("ab"), ensure_tuple([1, 2]), ensure_tuple({"a": 3})
        ((), ('ab',), (1, 2), (3,))
    """
    if x is None:
        return ()
    if isinstance(x, Mapping):
        return tuple(x.values())
    return tuple(x) if isinstance(x, Sequence) and not isinstance(x, str | bytes | bytearray) else (x,)


def map_collection(collection: Any, map_fn: Callable[[Any], Any]) -> Any:
    """Return a list, tuple or dictionary of the same type with mapped items; of another value the function's result.

    Example:
        >>> map_collection({"a": 1}, str), map_collection(3, str)
        ({'a': '1'}, '3')
    """
    if isinstance(collection, (list, tuple)):
        return getattr(collection, "_make", type(collection))(map(map_fn, collection))  # a NamedTuple has _make
    if isinstance(collection, dict):
        mapped = copy.copy(collection)
        for key, item in collection.items():
            mapped[key] = map_fn(item)
        return mapped
    return map_fn(collection)


def convert_nested_dict_to_flat_dict(nested_dict: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one with the joined names; empty ones are left out, and lists are values.

    Args:
        nested_dict: The dictionaries.
        prefix: The first part of each name, unless it is empty.

    Example:
        >>> convert_nested_dict_to_flat_dict({"a": {"b": 1, "c": {}}, "d": [2]}, "run")
        {'run/a/b': 1, 'run/d': [2]}
    """
    flattened: dict[str, Any] = {}
    for name, value in nested_dict.items():
        path = f"{prefix}/{name}" if prefix else name
        flattened |= convert_nested_dict_to_flat_dict(value, path) if isinstance(value, dict) else {path: value}
    return flattened


def convert_flat_dict_to_nested_dict(flat_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dictionary with joined names as nested ones.

    Example:
        >>> convert_flat_dict_to_nested_dict({"a/b": 1, "a/c": 2})
        {'a': {'b': 1, 'c': 2}}
    """
    nested: dict[str, Any] = {}
    for path, value in flat_dict.items():
        *outer, last = path.split("/")
        functools.reduce(lambda inner, name: inner.setdefault(name, {}), outer, nested)[last] = value
    return nested


def do_nothing(*_: object, **__: object) -> None:
    """Do nothing.

    Example:
        >>> do_nothing()
    """


def using_torch_2() -> bool:
    """Return True.

    Example:
        >>> using_torch_2()
        True
    """
    return True


def is_xla_installed() -> bool:
    """Return False: devices of XLA and HPU are not supported.

    Example:
        >>> is_xla_installed()
        False
    """
    return False


def is_notebook() -> bool:
    """Return whether the program runs in IPython.

    Example:
        >>> is_notebook()
        False
    """
    return hasattr(builtins, "__IPYTHON__")


class ExportFormat(enum.StrEnum):
    """The formats of exported models.

    Example:
        >>> ExportFormat("onnx") is ExportFormat.ONNX
        True
    """

    TORCHSCRIPT = "torchscript"
    ONNX = "onnx"


class ParallelismType(enum.StrEnum):
    """The dimensions of a mesh of processes.

    Example:
        >>> ParallelismType("tensor_parallel") is ParallelismType.TENSOR_PARALLEL
        True
    """

    DATA_PARALLEL_SHARD = "data_parallel_shard"
    DATA_PARALLEL_REPLICATE = "data_parallel_replicate"
    TENSOR_PARALLEL = "tensor_parallel"


class VersionedDeprecationWarning(DeprecationWarning):
    """A warning with the version in which something will be removed.

    Example:
        >>> print(VersionedDeprecationWarning("Use b.", remove_version="1.0"))
        Use b. It will be removed in version 1.0.
    """

    def __init__(self, message: str, remove_version: str) -> None:
        super().__init__(f"{message} It will be removed in version {remove_version}.")


def create_interval_scheduler(
    interval: str | int | Time,
    include_end_of_training: bool = True,
    checkpoint_events: bool = True,
    final_events: Set[Event | str] | None = None,
) -> Callable[[State, Event], bool]:
    """Return a function ``f(state, event)`` that is True at the end of each interval.

    Args:
        interval: How often; a whole number counts epochs.
        include_end_of_training: Whether it is also True at the end of the training, if no interval ends at its last
            batch.
        checkpoint_events: Whether the function is for ``BATCH_CHECKPOINT`` and ``EPOCH_CHECKPOINT`` instead of
            ``BATCH_END`` and ``EPOCH_END``.
        final_events: The events at which it is True at the end of the training; ``BATCH_CHECKPOINT`` and
            ``EPOCH_CHECKPOINT`` if None. A training in epochs ends with the second of them.

    Raises:
        ValueError: The interval is no length of time, or negative.

    Example:
        >>> from composer.core import State, Timestamp
        >>> is_due = create_interval_scheduler("2ba")
        >>> state = State(model=None)
        >>> state.previous_timestamp, state.timestamp = Timestamp(batch=1), Timestamp(batch=2)
        >>> is_due(state, Event.BATCH_CHECKPOINT), is_due(state, Event.BATCH_END)
        (True, False)
    """
    every = Interval.named("interval", interval)
    part = {TimeUnit.EPOCH: "epoch", TimeUnit.ITERATION: "iteration"}.get(every.every.unit, "batch")
    usual = Event(f"{part}_{'checkpoint' if checkpoint_events else 'end'}")
    final = final_events or {Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT}
    last_batch = -1

    def is_due(state: State, event: Event) -> bool:
        nonlocal last_batch
        batch, duration = int(state.timestamp.batch), state.max_duration
        is_over = duration is not None and state.timestamp.get(duration.unit) >= duration
        if include_end_of_training and is_over and every.every.value and event in final and batch != last_batch:
            return True
        if event != usual or not every.is_due(state):
            return False
        last_batch = batch
        return True

    return is_due


def is_model_ddp(model: nn.Module) -> bool:
    """Return whether a module is torch's ``DistributedDataParallel``.

    Example:
        >>> is_model_ddp(nn.Linear(2, 2))
        False
    """
    return isinstance(model, nn.parallel.DistributedDataParallel)


def is_model_deepspeed(model: nn.Module) -> bool:
    """Return False.

    Example:
        >>> is_model_deepspeed(nn.Linear(2, 2))
        False
    """
    del model
    return False


class MissingConditionalImportError(ImportError):
    """An optional package is not installed.

    Args:
        extra_deps_group: The extra that contains it.
        conda_package: Its name; for conda, and here also for pip.
        conda_channel: Its channel for conda.

    Example:
        >>> print(MissingConditionalImportError("nlp", "transformers"))
        transformers, of the extra 'nlp', is not installed: pip install transformers
    """

    def __init__(self, extra_deps_group: str, conda_package: str, conda_channel: str | None = "conda-forge") -> None:
        self.conda_channel = conda_channel
        super().__init__(
            f"{conda_package}, of the extra {extra_deps_group!r}, is not installed: pip install {conda_package}"
        )


def check_max_duration(t_max: Time | str, state: State) -> None:
    """Raise an error if the training is longer than a schedule.

    Raises:
        ValueError: It is.

    Example:
        >>> check_max_duration("4ba", State(model=None, max_duration="2ep", dataloader_len=2))
    """
    if state.max_duration is None:
        return
    whole, end = convert_time(state.max_duration, state), convert_time(t_max, state)
    if whole.unit is end.unit and whole > end:
        raise ValueError(f"t_max must be at least max_duration, {state.max_duration}, got {t_max}. Raise it.")


def initial_microbatch_size(size: int | str | None, auto_microbatching: bool, train_dataloader: Any) -> int | None:
    """Return the number of samples in a microbatch: ``size``, or that of the loader's batches if it is not given.

    Raises:
        ValueError: Neither is known.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> initial_microbatch_size(None, False, DataLoader([1, 2], batch_size=2))
        2
    """
    if train_dataloader is None or not (auto_microbatching or size is None):
        return size if isinstance(size, int) else None
    batch_size: int | None = getattr(train_dataloader, "batch_size", None)
    if batch_size is None:
        raise ValueError("device_train_microbatch_size must be given for a loader without batch_size, got None.")
    return batch_size


def get_rng_state() -> list[dict[str, Any]]:
    """Return the states of the global generators of all processes, for :func:`load_rng_state`.

    Example:
        >>> sorted(get_rng_state()[0])
        ['numpy', 'python', 'torch']
    """
    return all_gather_object(randomness.rng_state(get_device()))


def load_rng_state(rng_state_dicts: Sequence[dict[str, Any]]) -> None:
    """Restore the generators of this process; nothing changes if there were fewer processes.

    Example:
        >>> import torch
        >>> states = get_rng_state()
        >>> first = torch.rand(2)
        >>> load_rng_state(states)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    for states in rng_state_dicts[get_global_rank() :][:1]:
        randomness.load_rng_state(states, get_device())


@contextlib.contextmanager
def seed_context(seed: int) -> Iterator[None]:
    """Seed the global generators of this process for a block, and restore them afterwards.

    Example:
        >>> with seed_context(17):
        ...     first = random.random()
        >>> with seed_context(17):
        ...     random.random() == first
        True
    """
    with randomness.preserve_rng_state(get_device()):
        seed_all(seed)
        yield


def get_node_signal_file_name(rng: object = None) -> str:
    """Return a new file name, the same in all processes of a machine.

    Args:
        rng: Ignored: the name does not depend on a seed.

    Example:
        >>> get_node_signal_file_name().startswith("._signal_file_node0_")
        True
    """
    del rng
    return f"._signal_file_node{get_node_rank()}_{from_rank_zero(secrets.token_hex(4))}"


def write_signal_file(signal_file_name: str, dir_path: str | None = None) -> str:
    """Write an empty file in the first process of each machine, and return its path.

    Example:
        >>> import tempfile
        >>> Path(write_signal_file("done", tempfile.mkdtemp())).exists()
        True
    """
    path = Path(dir_path or Path.cwd(), signal_file_name)
    if get_local_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return str(path)


def busy_wait_for_local_rank_zero(dir_path: str | None = None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the first process of the machine runs a block before the others.

    Args:
        dir_path: Ignored: the processes wait for each other without a file.

    Example:
        >>> with busy_wait_for_local_rank_zero():
        ...     pass
    """
    del dir_path
    return run_local_rank_zero_first()


@contextlib.contextmanager
def local_rank_zero_download_and_wait(expected_file_path: str) -> Iterator[None]:
    """Run a block as soon as the first process of the machine has written a file; that process runs it at once.

    It waits without a time limit and without a collective.

    Example:
        >>> with local_rank_zero_download_and_wait("weights.bin"):
        ...     pass
    """
    while get_local_rank() != 0 and not Path(expected_file_path).exists():
        time.sleep(0.1)
    yield


def retry(
    exc_class: type[Exception] | Sequence[type[Exception]] = Exception,
    num_attempts: int = 3,
    initial_backoff: float = 1.0,
    max_jitter: float = 0.5,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that calls a function again after an error.

    Args:
        exc_class: The errors after which it is called again.
        num_attempts: How often it is called at most.
        initial_backoff: Seconds before the second call, doubled before each further one.
        max_jitter: At most so many seconds more, at random.

    Example:
        >>> tries = iter([0, 1])
        >>> @retry(ZeroDivisionError, initial_backoff=0.0, max_jitter=0.0)
        ... def divide():
        ...     return 1 / next(tries)
        >>> divide()
        1.0
    """
    errors = exc_class if isinstance(exc_class, type) else tuple(exc_class)

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def again(*args: P.args, **kwargs: P.kwargs) -> T:
            for attempt in range(num_attempts - 1):
                try:
                    return function(*args, **kwargs)
                except errors:
                    time.sleep(initial_backoff * 2**attempt + random.SystemRandom().uniform(0, max_jitter))
            return function(*args, **kwargs)

        return again

    return decorate


def split_list(items: Sequence[Any], microbatch_size: int) -> list[Any]:
    """Return parts of a list, each with so many items.

    Example:
        >>> split_list([1, 2, 3], 2)
        [[1, 2], [3]]
    """
    return [items[start : start + microbatch_size] for start in range(0, len(items), microbatch_size)]


class _Config(dict[str, Any]):
    """Settings of the Trainer, which are also attributes by Composer's names."""

    def __init__(self, settings: Mapping[str, Any], **attributes: Any) -> None:
        super().__init__(settings)
        vars(self).update(attributes)

    def __setattr__(self, name: str, value: Any) -> None:
        arguments = {**vars(self), name: value}
        self.clear()
        self.__init__(**arguments)  # type: ignore[misc]  # the attributes are the arguments of the constructor


class FSDPConfig(_Config):
    """Settings of FSDP1 or FSDP2 for ``parallelism_config={"fsdp": ...}``; the attributes have Composer's defaults.

    Args:
        sharding_strategy: ``"FULL_SHARD"``; ``"SHARD_GRAD_OP"``, which keeps weights after the forward pass; or
            ``"HYBRID_SHARD"``, which replicates the sharded model, on each machine if there is no
            ``data_parallel_replicate_degree`` or ``data_parallel_shard_degree``.
        settings: Other settings of FSDP1, and those of :class:`~composer.distributed.FSDPSettings`.

    Example:
        >>> config = FSDPConfig("SHARD_GRAD_OP", mixed_precision="PURE")
        >>> config, config.use_orig_params
        ({'sharding_strategy': 'SHARD_GRAD_OP', 'mixed_precision': 'PURE'}, True)
    """

    _defaults: ClassVar[Mapping[str, Any]] = {
        **{field.name: field.default for field in attrs.fields(FSDPSettings)},
        **FSDP1_DEFAULTS,
    }

    def __init__(self, sharding_strategy: str | None = None, **settings: Any) -> None:
        given = {} if sharding_strategy is None else {"sharding_strategy": sharding_strategy}
        super().__init__(given | settings, **given, **settings)

    def __getattr__(self, name: str) -> Any:
        if name in self._defaults:
            return self._defaults[name]
        raise AttributeError(f"FSDPConfig has no attribute {name!r}")


class TPConfig(_Config):
    """Settings of tensor parallelism for ``parallelism_config={"tp": ...}``.

    Args:
        device_mesh: Ignored: the degree arranges the processes.
        tensor_parallel_degree: The number of processes that compute a layer together.
        layer_plan: The layers to split, and how.

    Example:
        >>> TPConfig(tensor_parallel_degree=2, layer_plan={"*.in": "colwise"})
        {'tensor_parallel_degree': 2, 'layer_plan': {'*.in': 'colwise'}}
    """

    def __init__(
        self,
        device_mesh: object = None,
        tensor_parallel_degree: int = 1,
        layer_plan: Mapping[str, Any] | None = None,
    ) -> None:
        del device_mesh
        settings = {"tensor_parallel_degree": tensor_parallel_degree, "layer_plan": layer_plan}
        super().__init__(settings, **settings)


class ParallelismConfig(_Config):
    """A ``parallelism_config`` of the Trainer.

    Args:
        fsdp: Settings of FSDP2, or an :class:`FSDPConfig`.
        tp: A :class:`TPConfig`.
        fsdp2: As ``fsdp``.

    Example:
        >>> ParallelismConfig(FSDPConfig())
        {'fsdp': {}}
    """

    def __init__(
        self,
        fsdp: Mapping[str, Any] | None = None,
        tp: Mapping[str, Any] | None = None,
        fsdp2: Mapping[str, Any] | None = None,
    ) -> None:
        sections = {"fsdp": fsdp if fsdp2 is None else fsdp2, "tp": tp}
        given = {name: section for name, section in sections.items() if section is not None}
        super().__init__(given, fsdp=fsdp, tp=tp, fsdp2=fsdp2)

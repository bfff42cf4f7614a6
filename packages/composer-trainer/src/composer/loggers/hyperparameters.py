"""The hyperparameters of a run as plain data: the declared settings of its components, and versions."""

from __future__ import annotations

import enum
import inspect
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from numbers import Number
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.optim import Optimizer

from composer.core import Evaluator, LoggerDestination, Serializable, State, Time
from composer.core.checks import describe
from composer.core.planning import component_keys
from composer.core.saving.components import by_key
from composer.core.saving.secrets import hide_secrets
from composer.distributed import get_local_world_size, get_world_size

_DESCRIBED = frozenset(
    {"model", "train_dataloader", "eval_dataloader", "algorithms", "callbacks", "loggers", "optimizers", "schedulers"}
)
_NO_SETTINGS = frozenset({"optimizer", "last_epoch"})  # of torch's schedulers
# Settings that are nested deeper, or have more items, are described by their type and length.
_DEEPEST, _LONGEST = 8, 100


def hyperparameters(
    state: State,
    *,
    loggers: Iterable[LoggerDestination] = (),
    schedulers: Iterable[Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the hyperparameters of a run as nested plain data: numbers, strings, None, lists and dictionaries.

    Only declared settings are described: the fields of attrs classes, what ``settings()`` of a component returns, the
    defaults of optimizers, and the arguments of other classes of torch and of this library. Other objects are described
    by their classes. Texts that are likely secrets are hidden, by their names (``auth``, ``api_key``, ``headers``, …)
    and within URLs.

    Args:
        state: The run.
        loggers: Its logger destinations.
        schedulers: Its schedulers as they were passed; those of the state if None.
        extra: Further settings, for the key ``"trainer"``.

    Returns:
        ``run_name``, ``rank_zero_seed``, ``device``, ``precision``, ``max_duration``,
        ``device_train_microbatch_size``; ``model``, ``train_dataloader`` and ``evaluators``; ``algorithms``,
        ``callbacks``, ``loggers``, ``optimizers`` and ``schedulers``, each a dictionary of settings by name;
        ``versions``; and ``trainer`` if ``extra`` is given. The names of MosaicML Composer
        are also there: ``composer_version``, ``num_nodes``, ``num_gpus_per_node`` (its processes) and
        ``enabled_algorithms/<class>``.

    Example:
        >>> from composer.core import State
        >>> described = hyperparameters(State(torch.nn.Linear(4, 2), max_duration="10ep"))
        >>> described["max_duration"], described["model"]["num_parameters"]
        ('10ep', 10)
    """
    described: dict[str, Any] = {
        "run_name": state.run_name,
        "rank_zero_seed": state.rank_zero_seed,
        "device": str(state.device),
        "precision": state.precision.value,
        "max_duration": None if state.max_duration is None else str(state.max_duration),
        "device_train_microbatch_size": state.device_train_microbatch_size,
        "model": _model(state.model),
        "train_dataloader": _loader(state.train_dataloader),
        "evaluators": {one.label: _evaluator(one) for one in state.evaluators},
        "algorithms": _named(state.algorithms),
        "callbacks": _named(state.callbacks),
        "loggers": _named(loggers),
        "optimizers": {key: _optimizer(one) for key, one in by_key(state.optimizers).items()},
        "schedulers": _named(state.schedulers if schedulers is None else schedulers),
        "versions": {**versions()},
        "composer_version": versions()["composer"],
        "num_nodes": get_world_size() // get_local_world_size(),
        "num_gpus_per_node": get_local_world_size(),
        **{f"enabled_algorithms/{type(algorithm).__name__}": True for algorithm in state.algorithms},
    }
    return described if extra is None else described | {"trainer": plain_settings(extra)}


def given_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that differ from their defaults, without those that have an entry of their own.

    Args:
        function: What is called.
        arguments: The values by name; names that are no arguments are ignored.

    Example:
        >>> def fit(model, seed=None, precision=None, device="cpu"): ...
        >>> given_arguments(fit, {"model": 3, "seed": 17, "precision": "fp32", "device": "cpu"})
        {'seed': 17, 'precision': 'fp32'}
    """
    defaults = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    return {
        name: value
        for name, default in defaults.items()
        if name not in _DESCRIBED
        and (value := arguments[name]) is not default
        and not (isinstance(default, (bool, int, float, str)) and value == default)
    }


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as plain data, with secrets hidden. Other objects become a string that describes them.

    Example:
        >>> plain_settings({"sizes": (1, 2), "device": torch.device("cpu"), "api_key": "abc", "act": torch.nn.GELU()})
        {'sizes': [1, 2], 'device': 'cpu', 'api_key': '(hidden)', 'act': 'object of torch.nn.modules.activation.GELU'}
    """
    data = {str(name): _to_data(value, 0) for name, value in settings.items()}
    return {name: hide_secrets(value, name) for name, value in data.items()}


@cache
def versions() -> dict[str, str | None]:
    """Return the versions of composer, torch, Python, CUDA and cuDNN; None for CUDA and cuDNN if not available.

    Example:
        >>> versions()["torch"] == torch.__version__
        True
    """
    cudnn: Any = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    return {
        "composer": version("composer-trainer"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
    }


def _named(components: Iterable[Any]) -> dict[str, Any]:
    components = list(components)
    keys = component_keys(components)
    names = [describe(one).rpartition(".")[2] if inspect.isroutine(one) else keys[id(one)] for one in components]
    return {name: plain_settings(settings_of(one)) for name, one in zip(names, components, strict=True)}


def settings_of(component: Any) -> dict[str, Any]:
    """Return the declared settings of a component; those with their own description as a string, as in checkpoints.

    Example:
        >>> from composer.algorithms import Augment
        >>> settings_of(Augment(torch.nn.Dropout2d(0.1)))["augmentation"]
        'Dropout2d(p=0.1, inplace=False)'
    """
    is_component = isinstance(component, Serializable)
    if settings := component.settings() if is_component else Serializable.settings(component):
        fields = attrs.fields(type(component)) if attrs.has(type(component)) else ()
        texts = {str(one.alias): one.metadata["describe"] for one in fields if "describe" in one.metadata}
        return settings | {name: texts[name](settings[name]) for name in settings.keys() & texts.keys()}
    if type(component).__module__.partition(".")[0] not in {"composer", "torch"}:
        return {}
    arguments = inspect.signature(type(component)).parameters.keys() - _NO_SETTINGS
    return {name: value for name, value in getattr(component, "__dict__", {}).items() if name in arguments}


def _class_name(one: object) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__}"


def _model(model: Any) -> dict[str, Any]:
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    network = getattr(model, "module", getattr(model, "model", None))  # of a ComposerClassifier, of a HuggingFaceModel
    inner = {"network": _class_name(network)} if isinstance(network, torch.nn.Module) else {}
    return {
        "class": _class_name(model),
        **inner,
        "num_parameters": sum(one.numel() for one in parameters),
        "num_trainable_parameters": sum(one.numel() for one in parameters if one.requires_grad),
    }


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the defaults of an optimizer, and the settings of each group that differ from them."""
    defaults = plain_settings(optimizer.defaults)
    groups = []
    for group in optimizer.param_groups:
        settings = plain_settings({name: value for name, value in group.items() if name in optimizer.defaults})
        different = {name: value for name, value in settings.items() if value != defaults[name]}
        groups.append({"num_parameters": sum(parameter.numel() for parameter in group["params"]), **different})
    return defaults | {"groups": groups}


def _evaluator(evaluator: Evaluator) -> dict[str, Any]:
    names = ("metric_names", "subset_num_batches", "device_eval_microbatch_size")
    interval = None if evaluator.eval_interval is None else repr(evaluator.eval_interval)
    settings = plain_settings({name: getattr(evaluator, name) for name in names})
    return settings | {"eval_interval": interval, "dataloader": _loader(evaluator.dataloader.dataloader)}


def _loader(loader: Any) -> dict[str, Any] | None:
    if loader is None:
        return None
    settings = {name: getattr(loader, name, None) for name in ("batch_size", "num_workers", "drop_last")}
    found: dict[str, Any] = {"class": type(loader).__name__}
    found |= {key: value for key, value in settings.items() if isinstance(value, int)}
    return found


def _to_data(value: Any, depth: int) -> Any:  # noqa: PLR0911  (one for each type)
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if isinstance(value, (Mapping, Sequence, set, frozenset)) and not isinstance(value, (bytes, str)):
        if depth >= _DEEPEST or len(value) > _LONGEST:
            return f"{type(value).__name__} of {len(value)}"
        if isinstance(value, Mapping):
            return {str(key): _to_data(item, depth + 1) for key, item in value.items()}
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [_to_data(item, depth + 1) for item in items]
    if isinstance(value, Tensor):  # a learning rate may be a tensor on the device, which is read once before training
        return value.item() if value.numel() == 1 else f"tensor {tuple(value.shape)}"
    if isinstance(value, Number):
        to_python: Any = getattr(value, "item", lambda: str(value))
        return to_python()
    if isinstance(value, (str, Time, Path, torch.device, torch.dtype, torch.memory_format)):
        return str(value)
    if attrs.has(type(value)) and depth < _DEEPEST:
        plain = {name: _to_data(item, depth + 1) for name, item in settings_of(value).items()}
        is_interval = list(plain) == ["every"]
        return str(plain["every"]) if is_interval else {"class": type(value).__name__} | plain
    return describe(value)

"""The settings that the results of a run depend on: saved by name, and compared with those of a resumed run."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from composer.core.checks import bulleted, caller_level
from composer.distributed import get_data_world_size
from composer.loggers.hyperparameters import plain_settings, settings_of
from composer.trainer.schedules import known_steps

if TYPE_CHECKING:
    from composer.core import State

_log = logging.getLogger(__name__)


def settings_of_run(
    state: State, loader: Any, sizes: Mapping[str, int], subset_num_batches: int, *, frozen: int
) -> dict[str, Any]:
    """Return the settings of a run by name.

    Args:
        state: The run.
        loader: Its training data; None if there is none yet.
        sizes: The known sizes of the data.
        subset_num_batches: The number of batches in an epoch; -1 for all.
        frozen: The number of parameters that the program does not train.
    """
    settings = {
        "seed": state.rank_zero_seed,
        "precision": str(state.precision),
        "device_train_microbatch_size": "auto" if state.auto_microbatching else state.device_train_microbatch_size,
        "the number of parameters without requires_grad": frozen,
    }
    if loader is None:
        return settings
    found: dict[str, Any] = {"class": type(loader).__name__, **sizes, "subset_num_batches": subset_num_batches}
    if "samples a batch" in sizes:
        found["samples a batch"] = sizes["samples a batch"] * get_data_world_size()  # the same for fewer processes
    if isinstance(loader, DataLoader):
        found["drop_last"] = loader.drop_last
        found["seed of its generator"] = loader.generator and loader.generator.initial_seed()
        found |= {name: type(getattr(loader, name)).__name__ for name in ("dataset", "sampler", "batch_sampler")}
    return settings | {f"train_dataloader.{name}": value for name, value in found.items()}


def settings_of_program(model: Any, schedulers: Iterable[Any]) -> dict[str, Any]:
    """Return what a program sets of the loss, dropout and schedules, by name, before a checkpoint is loaded.

    Args:
        model: The model.
        schedulers: The arguments of the Trainer.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    dropout = Counter(str(module.p) for module in modules if isinstance(module, _DropoutNd))
    return {
        "loss_fn": _described(getattr(model, "loss_fn", None)),
        "dropout": ", ".join(f"{count} of {rate}" for rate, count in sorted(dropout.items())) or "none",
        "schedulers": ", ".join(map(_described, schedulers)) or "none",
    }


def _described(one: Any) -> str:
    """Return the name of a class or function with its declared settings."""
    if one is None or inspect.isroutine(one):
        return str(getattr(one, "__qualname__", None))
    settings = {name: value for name, value in plain_settings(settings_of(one)).items() if value is not None}
    if isinstance(one, functools.partial):
        settings, one = plain_settings(one.keywords), one.func
    if isinstance(one, LRScheduler) and (steps := known_steps(one)):
        settings["steps"] = steps
    arguments = ", ".join(f"{name}={value}" for name, value in settings.items())
    return f"{getattr(one, '__qualname__', type(one).__qualname__)}({arguments})"


def report_settings(saved: Mapping[str, Any], now: Mapping[str, Any], path: str) -> None:
    """Report which settings have changed since a checkpoint was saved, which are the same, and which are not known.

    It is a warning if any have changed, and else a message of the log.
    """
    known = [name for name in now if name in saved]
    changed = [name for name in known if saved[name] != now[name]]
    unknown = [name for name in {**now, **saved} if name not in known]
    rows = [f"{name}: {saved[name]} was saved, {now[name]} is set." for name in changed]
    rows += [f"the same: {', '.join(name for name in known if name not in changed)}."]
    unknown += ["the samples, what a sampler of another library draws, and the code of the program"]
    rows += [f"not comparable: {', '.join(unknown)}."]
    if changed:
        title = (
            f"The run resumes from {path} with other settings, so that its results are not those of an uninterrupted "
            "run. The seed is the saved one (load_ignore_keys='rank_zero_seed' keeps the new one), and so are "
            "requires_grad (until set after the Trainer is constructed) and the numbers of torch's schedulers; all "
            "else is as the program sets it:"
        )
        warnings.warn(bulleted(title, rows), stacklevel=caller_level())
    else:
        _log.info("%s", bulleted(f"The settings of this run and of {path}:", rows))

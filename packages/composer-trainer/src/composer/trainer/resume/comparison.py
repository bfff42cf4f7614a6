"""Which settings of a resumed run, among those that its results depend on, differ from the saved ones."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from composer.core.checks import bulleted, caller_level
from composer.distributed import get_data_world_size

if TYPE_CHECKING:
    from composer.core import State
    from composer.trainer.data.settings import TrainingData

_log = logging.getLogger(__name__)


def settings_of(state: State, data: TrainingData, *, seed: int, frozen: int) -> dict[str, Any]:
    """Return the settings of a run by name.

    Args:
        state: The run.
        data: Its training data.
        seed: The seed that the program gives, or else that of the run.
        frozen: The number of parameters that the program does not train.
    """
    settings = {
        "seed": seed,
        "precision": str(state.precision),
        "device_train_microbatch_size": "auto" if state.auto_microbatching else state.device_train_microbatch_size,
        "the number of parameters without requires_grad": frozen,
    }
    if data.batches is None:
        return settings
    loader, sizes = data.batches.spec.dataloader, data.batches.place_reader.sizes
    found: dict[str, Any] = {"class": type(loader).__name__, **sizes, "subset_num_batches": data.subset_num_batches}
    if "samples a batch" in sizes:
        found["samples a batch"] = sizes["samples a batch"] * get_data_world_size()  # the same for fewer processes
    if isinstance(loader, DataLoader):
        found["drop_last"] = loader.drop_last
        found["seed of its generator"] = loader.generator and loader.generator.initial_seed()
        found |= {name: type(getattr(loader, name)).__name__ for name in ("dataset", "sampler", "batch_sampler")}
    return settings | {f"train_dataloader.{name}": value for name, value in found.items()}


def report(saved: Mapping[str, Any], now: Mapping[str, Any], path: str) -> None:
    """Report which settings have changed since a checkpoint was saved, which are the same, and which are not known.

    It is a warning if any have changed, and else a message of the log.
    """
    known = [name for name in now if name in saved]
    changed = [name for name in known if saved[name] != now[name]]
    unknown = [name for name in {**now, **saved} if name not in known]
    rows = [f"{name}: {saved[name]} was saved, {now[name]} is set." for name in changed]
    rows += [f"the same: {', '.join(name for name in known if name not in changed)}."]
    rows += [f"not comparable: {', '.join([*unknown, 'the samples and what a sampler of another library draws'])}."]
    if changed:
        title = (
            f"The run resumes from {path} with other settings, so that its results are not those of an uninterrupted "
            "run. The seed is the saved one (load_ignore_keys='rank_zero_seed' keeps the new one), and so is "
            "requires_grad (until set after the Trainer is constructed); all else is as the program sets it:"
        )
        warnings.warn(bulleted(title, rows), stacklevel=caller_level())
    else:
        _log.info("%s", bulleted(f"The settings of this run and of {path}:", rows))

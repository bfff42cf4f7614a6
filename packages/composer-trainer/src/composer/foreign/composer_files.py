"""The state in a checkpoint file of MosaicML Composer, with the names and the form that it has here."""

from __future__ import annotations

import ast
import datetime
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from composer.checkpoint.contents import FIRST_PROCESS, OWN_PROCESS, SavedObjects, SavedPlace
from composer.checkpoint.manifest import dictionary
from composer.core import State, Timestamp
from composer.core.saving import saved_state
from composer.core.saving.components import by_key
from composer.core.saving.model_state import bare_name
from composer.core.saving.randomness import check_rng_state, rng_state, to_tensor
from composer.distributed import get_global_rank, get_world_size

_COUNTS = ("epoch", "batch", "sample", "token", "batch_in_epoch", "sample_in_epoch", "token_in_epoch")
_CONSTANTS = ("blur_filter", "filt2d", "alibi")
"""Buffers of layers that compute them here."""
_RENAMED = (
    (r"\bpool_and_mlp\.2\.", "reduce."),
    (r"\bpool_and_mlp\.4\.", "expand."),
    (r"\bmodule0\.", "first."),
    (r"\bmodule1\.", "second."),
    (r"\bbatchnorm\.(?=(weight|bias|running_mean|running_var|num_batches_tracked)$)", ""),
    (r"\boutput\.((non_)?gated_layer)\.", r"intermediate.\1."),
    (r"\boutput\.wo\.", "output.dense."),
    (r"\boutput\.layernorm\.", "output.LayerNorm."),
)
"""Names in layers of SqueezeExcite, Factorize, GhostBatchNorm and GatedLinearUnits, and those here."""


def names_here(names: Iterable[str], own: Collection[str]) -> dict[str, str]:
    """Return the names in the model of the weights in a file.

    They may begin with ``module.``, ``model.`` or ``_orig_mod.`` on one side only, as wrappers name a network, and
    Composer's algorithms rename weights.

    Args:
        names: The names in the file.
        own: The names in the model.

    Returns:
        For each name the one here. Constants of Composer's layers are left out.

    Example:
        >>> names_here(["0.blur_filter", "0.conv.weight", "1.module0.weight"], own=["0.conv.weight"])
        {'0.conv.weight': '0.conv.weight', '1.module0.weight': '1.first.weight'}
    """
    bare = {name: bare_name(name).removeprefix("module.") for name in names}
    candidates = [{name: name for name in bare}]
    for left_out, added in itertools.product(("", "model."), ("", "module.", "model.")):
        candidates.append({name: added + new.removeprefix(left_out) for name, new in bare.items()})
    chosen = max(candidates, key=lambda candidate: len({*candidate.values()} & {*own}))
    renamed = _renamed(chosen.values(), own)
    return {name: renamed[new] for name, new in chosen.items() if new in renamed}


def _renamed(names: Collection[str], own: Collection[str]) -> dict[str, str]:
    """Return the names here of weights that Composer's algorithms have renamed; those in the model do not change."""
    blurred = [re.escape(name.removesuffix("blur_filter")) for name in names if name.endswith("blur_filter")]
    # Composer blurs around the squeeze-and-excitation of a convolution, and here it is outside.
    inside = rf"^({'|'.join(blurred)})conv\.(?=se\.)"
    has_alibi = any(name.endswith(".alibi") for name in names)
    renamed: dict[str, str] = {}
    for name in names:
        new = name
        if name not in own:
            last = name.rpartition(".")[2]
            if last in _CONSTANTS or (has_alibi and re.search(r"\bposition_(ids|embeddings\.weight)$", name)):
                continue
            for pattern, replacement in (*_RENAMED, *([(inside, r"\1")] if blurred else [])):
                new = re.sub(pattern, replacement, new)
        renamed[name] = name if new in names else new
    return renamed


@attrs.frozen
class ComposerFile:
    """The content of a checkpoint file of MosaicML Composer.

    Args:
        state: What it has under ``"state"``.
        generators: What it has under ``"rng"``, an entry for each process.

    Example:
        >>> clock = {"epoch": 2, "batch": 8, "sample": 64, "token": 0, "batch_in_epoch": 0}
        >>> file = ComposerFile({"model": {}, "timestamp": {"Timestamp": clock}})
        >>> file.timestamp().batch
        Time(8, TimeUnit.BATCH)
    """

    state: Mapping[str, Any]
    generators: Any = None

    @classmethod
    def of(cls, content: object) -> ComposerFile | None:
        """Return the content of a file as such, or None if it is of another library."""
        found = dictionary(content)
        state = dictionary(found.get("state"))
        is_composer = isinstance(state.get("model"), Mapping) and "timestamp" in state
        return cls(state, found.get("rng")) if is_composer else None

    def surgery(self) -> list[dict[str, Any]]:
        """Return the algorithms that can be constructed again from their ``repr``, as records of a saved state.

        These are the ones that change the model: only their ``repr`` has all settings. It is parsed and not run. That
        of GyroDropout has none, and no weights depend on it.
        """
        records = []
        for name, state in self._algorithms().items():
            settings = _parse_call(state.get("repr"), name)
            if settings is not None and name != "GyroDropout":
                records.append({"key": name, "name": name, "settings": settings, "state": {}, "required_on_load": True})
        return records

    def model(self, names: Mapping[str, str], *, averaged: bool) -> dict[str, Any]:
        """Return the weights and the algorithms that change the model, as a saved state has them.

        Args:
            names: The names here of the weights.
            averaged: Whether the weights are those for evaluation, or those to continue the training with.
        """
        weights = self.weights(averaged=averaged)
        return {"model": {new: weights[name] for name, new in names.items()}, "algorithms": self.surgery()}

    def ignored(self, run: State) -> tuple[str, ...]:
        """Return the paths of what a run keeps: its algorithms, and the masks of GyroDropout, which are not saved."""
        has_masks = "GyroDropout" in self._algorithms()
        masks = [name for name in run.get_model_state_dict() if has_masks and name.endswith((".seed", ".position"))]
        algorithms = [f"algorithms/{run.component_key(algorithm)}" for algorithm in run.algorithms]
        return (*algorithms, *(f"model/{name}" for name in masks))

    def to_saved(self, names: Mapping[str, str], run: State) -> tuple[dict[str, Any], list[str]]:
        """Return what the file has of a run, as a checkpoint has it, and in words what is not read of it.

        Args:
            names: The names here of the weights.
            run: The run.
        """
        rng = self.rng(run.device)
        saved = {"version": saved_state.VERSION, **self.model(names, averaged=False)}
        own = {run.component_key(algorithm) for algorithm in run.algorithms}
        saved["algorithms"] = [one for one in saved["algorithms"] if one["key"] not in own]
        schedulers = by_key(run.schedulers)
        saved["schedulers"] = [{"key": key, "state": self.scheduler(key, one)} for key, one in schedulers.items()]
        not_read = [] if rng else ["the generators of random numbers"]
        not_read.append("the order of the data of a DataLoader with shuffle=True")
        not_read += [f"the state of {name}" for name, state in self._algorithms().items() if set(state) - {"repr"}]
        if (optimizers := self.optimizers(names)) is None:
            not_read.append("the optimizers")
        else:
            saved["optimizers"] = optimizers
        if (clock := self.timestamp()) is None:
            not_read.append("the clock")
        else:
            saved["timestamp"] = clock.state_dict()
        return saved | {"extra": self.resume_data(rng, rng_state(run.device))}, not_read

    def weights(self, *, averaged: bool) -> dict[str, Any]:
        """Return the weights for evaluation, or those to continue the training with, which EMA exchanges in a file."""
        weights = dict(self.state["model"])
        ema = self._algorithms().get("EMA", {})
        if bool(ema.get("ema_weights_active")) is not averaged:  # EMA has the others
            for part in dictionary(ema.get("ema_model")).values():
                weights |= {name: value for name, value in dictionary(part).items() if name in weights}
        return weights

    def optimizers(self, names: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the state of the optimizers, with the names of parameters here; None if it has no names."""
        optimizers = {}
        for key, saved in dictionary(self.state.get("optimizers")).items():
            state, groups = dictionary(saved).get("state"), dictionary(saved).get("param_groups")
            if not isinstance(state, Mapping) or not isinstance(groups, list):
                return None
            if not all(
                isinstance(name, str) for group in groups for name in (*state, *dictionary(group).get("params", ()))
            ):
                return None
            optimizers[key] = {
                "state": {names.get(name, name): dict(dictionary(values)) for name, values in state.items()},
                "param_groups": [
                    {**group, "params": [names.get(name, name) for name in group["params"]]} for group in groups
                ],
            }
        return optimizers or None

    def timestamp(self) -> Timestamp | None:
        """Return the clock; None if it is not plain data."""
        saved = dictionary(dictionary(self.state.get("timestamp")).get("Timestamp"))
        counts = {name: saved[name] for name in _COUNTS if type(saved.get(name)) is int and saved[name] >= 0}
        if not counts.keys() >= {"epoch", "batch", "sample", "token"}:
            return None
        total = saved.get("total_wct")
        has_time = isinstance(total, datetime.timedelta) and total >= datetime.timedelta()
        return Timestamp(iteration=counts["epoch"], **counts, total_wct=total if has_time else None)

    def scheduler(self, key: str, own: Any) -> dict[str, Any]:
        """Return the state of a scheduler, with the values that the file has of it."""
        saved = dictionary(dictionary(self.state.get("schedulers")).get(key))
        return {name: saved.get(name, value) for name, value in own.state_dict().items()}

    def resume_data(self, rng: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a Trainer saves beside the state: the place in the data, and the generators of each process.

        Args:
            rng: The states of the generators; empty if those of the file cannot be used.
            own: Those of this process, in place of them. A file without generators has as many processes as the run.
        """
        saved = len(self.generators) if isinstance(self.generators, Sequence) else 0
        rng = rng or [own] * (saved or get_world_size())
        clock = self.timestamp() or Timestamp()
        done = clock.counts.batch_in_epoch
        loader = dictionary(self.state.get("dataset_state")).get("train")
        if loader is not None:  # as the order of a loader that saves itself has it
            loader = {"state": loader, "left": False, "at_start": {}, "now": {}}
        place = SavedPlace(clock.counts.epoch, done, loader=loader, as_sampler=True)
        each = {"data": attrs.asdict(place), "loggers": {}, "metrics": {}, "objects": attrs.asdict(SavedObjects())}
        return {
            "clock_before": clock.state_dict(),  # the file has none
            "interrupted": {},
            "microbatch_size": None,
            FIRST_PROCESS: {**each, "rng": rng[0]},
            OWN_PROCESS: {**each, "rng": rng[get_global_rank()]} if 0 < get_global_rank() < len(rng) else None,
            "skipped_steps": torch.zeros((), dtype=torch.int64),
            "tensor_parallel": 1,
            "world_size": len(rng),
        }

    def rng(self, device: torch.device) -> list[dict[str, Any]]:
        """Return the states of the global generators of each process; nothing if a device or a library differs."""
        try:
            states = [_generators(one) for one in self.generators]
            for one in states:
                check_rng_state(one, device, "rng")
        except (TypeError, ValueError, KeyError):
            return []
        return states

    def _algorithms(self) -> dict[str, Mapping[str, Any]]:
        saved = self.state.get("algorithms")
        items = list(saved.items()) if isinstance(saved, Mapping) else saved if isinstance(saved, list) else []
        pairs = [item for item in items if isinstance(item, (tuple, list)) and len(item) == 2]
        return {name: dictionary(state) for name, state in pairs if isinstance(name, str)}


def _generators(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the generators of a process as :func:`composer.core.saving.randomness.rng_state` does."""
    version, words, gauss = states["python"]
    name, key, pos, has_gauss, cached = states["numpy"]
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "bit_generator": name,
            "state": {"key": to_tensor(key), "pos": pos},
            "has_gauss": has_gauss,
            "gauss": cached,
        },
        **{name: {"torch": states[name]} for name in ("torch", "cuda") if name in states},
    }


def _parse_call(text: object, name: str) -> dict[str, Any] | None:
    """Return the settings in a string such as ``BlurPool(min_channels=16)``; None if it is another string."""
    try:
        # Of a long string with deep nesting, the parser uses up the memory or the stack.
        call = ast.parse(text, mode="eval").body if isinstance(text, str) and len(text) < 2000 else None
        if not isinstance(call, ast.Call) or call.args or getattr(call.func, "id", None) != name:
            return None
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None

"""PostHocEMA: averages whose width is chosen after the training."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import attrs
import torch
from torch import Tensor

from composer import functional as cf
from composer.algorithms._averages import AveragedWeights, has_passed, to_interval
from composer.algorithms._idle import warn_at_end
from composer.core import Algorithm, Event, Logger, Stage, State, Time, TimeUnit, saved
from composer.core.checks import is_flag, to_path
from composer.core.files import check_template, fill_in_run, write_atomically
from composer.core.saving.components import read_state, transient
from composer.core.saving.records import read
from composer.functional.dtensors import is_dtensor
from composer.functional.training.ema import average_dtype

_NAME = re.compile(r"updates-(\d{9,})-sigma-([\d.e-]+)\.safetensors")


def _to_folder(given: str | os.PathLike[str]) -> str:
    return check_template(to_path("folder", given), "folder", ["run_name"])


def _to_interval(given: Time | str | int) -> Time:
    return to_interval(given, "snapshot_interval")


def _to_sigma_rels(given: Sequence[float]) -> tuple[float, ...]:
    sigma_rels = tuple(given)
    for sigma_rel in sigma_rels:
        cf.power_ema_smoothing(1, sigma_rel)  # raises
    if len({*sigma_rels}) < 2:
        raise ValueError(f"sigma_rels must be at least two different numbers, got {given!r}: e.g. (0.05, 0.1).")
    return sigma_rels


class Snapshot(NamedTuple):
    """A file with an average."""

    num_updates: int
    sigma_rel: float
    path: Path


@attrs.define(eq=False)
class PostHocEMA(Algorithm):
    """Save snapshots of two averages, from which :func:`post_hoc_ema` computes an average of any width afterwards.

    The averages are updated after each batch by :func:`composer.functional.power_ema_smoothing` (arXiv:2312.02696).
    They are not used for evaluation, and nothing that is trained changes. Each snapshot is a file of safetensors with
    the weights of the unwrapped model by name, at least in float32; tied weights occur once, and frozen parameters,
    which have no averages, in the first snapshot alone. The process of rank 0 writes it while the others wait.

    Args:
        folder: The folder of the snapshots, one for each training; ``{run_name}`` is filled in.
        snapshot_interval: The interval of snapshots, in batches or epochs; there is another one at the end of a fit. 20
            or more in a training determine other widths well.
        sigma_rels: The widths of the averages, as fractions of the training.
        overwrite: Whether a training that starts deletes the snapshots in the folder, instead of raising an error.

    Raises:
        TypeError: A value is of another type.
        ValueError: A value is out of range; at the start of a training, the folder already has snapshots.

    Example:
        >>> PostHocEMA("{run_name}/averages", snapshot_interval="500ba").sigma_rels
        (0.05, 0.1)
    """

    folder: str = attrs.field(converter=_to_folder)
    snapshot_interval: Time = attrs.field(default="1ep", converter=_to_interval)
    sigma_rels: tuple[float, ...] = attrs.field(default=(0.05, 0.1), converter=_to_sigma_rels)
    overwrite: bool = attrs.field(default=False, validator=is_flag)

    _num_updates: int = saved(default=0)
    _averages: list[AveragedWeights] = transient(
        default=attrs.Factory(lambda self: [AveragedWeights("PostHocEMA") for _ in self.sigma_rels], takes_self=True)
    )
    _saved_at: int = transient(default=0)

    runs_at: ClassVar = dict.fromkeys((Event.FIT_START, Event.BATCH_END, Event.EPOCH_END, Event.FIT_END), Stage.WEIGHTS)
    reads: ClassVar = {"model", "timestamp"}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Update the averages after a batch, and save them at the interval."""
        if event is Event.FIT_START:
            self._begin(state)
            return
        if event is Event.BATCH_END:
            self._num_updates += 1
            for sigma_rel, average in zip(self.sigma_rels, self._averages, strict=True):
                average.check(state.model, training=True)
                average.update(state.model, cf.power_ema_smoothing(self._num_updates, sigma_rel))
        if event is Event.FIT_END or has_passed(self.snapshot_interval, event, state):
            self._save(state)
        if event is Event.FIT_END and state.rank == 0 and len(snapshots(self._folder(state))) == len(self.sigma_rels):
            warn_at_end(
                state,
                "PostHocEMA has written only one snapshot of each average, from which post_hoc_ema determines no other "
                f"widths: choose a shorter snapshot_interval than {self.snapshot_interval}.",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, and the averages with their widths."""
        averages = [average.state_dict() for average in self._averages]
        return {**super().state_dict(), "averages": averages, "sigma_rels": list(self.sigma_rels)}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Check that ``state`` is a result of :meth:`state_dict`.

        Raises:
            ValueError: A key is missing or unknown, a value is of another type, or the averages have other widths.
        """
        self._read(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        self._num_updates, averages = self._read(state)
        for average, loaded in zip(self._averages, averages, strict=True):
            average.load_state_dict(loaded)

    def _read(self, state: dict[str, Any]) -> tuple[int, list[dict[str, dict[str, Tensor]]]]:
        """Return the number of updates, and the states of the averages."""
        rest = {name: value for name, value in state.items() if name not in {"averages", "sigma_rels"}}
        averages = read(state.get("averages"), list[dict[str, dict[str, Tensor]]], "PostHocEMA.averages")
        widths = tuple(read(state.get("sigma_rels"), list[float], "PostHocEMA.sigma_rels"))
        if widths != self.sigma_rels:
            raise ValueError(f"PostHocEMA must have sigma_rels={widths}, as it was saved with, got {self.sigma_rels}.")
        return read_state(self, rest)["_num_updates"], averages

    def _begin(self, state: State) -> None:
        for average in self._averages:
            average.begin_fit(state)
        if state.timestamp.count(TimeUnit.BATCH):
            return
        self._num_updates = self._saved_at = 0
        found = snapshots(self._folder(state)) if state.rank == 0 else []
        if found and not self.overwrite:
            raise ValueError(
                f"PostHocEMA(folder={self.folder!r}) has {len(found)} snapshots of another training. Choose another "
                "folder, or set overwrite=True, which deletes them."
            )
        for snapshot in found:
            snapshot.path.unlink()

    def _folder(self, state: State) -> Path:
        return Path(fill_in_run(self.folder, state, "folder", ["run_name"]))

    @torch.no_grad()
    def _save(self, state: State) -> None:
        """Write a file for each average."""
        if self._saved_at == self._num_updates:
            return
        from safetensors.torch import save_file  # noqa: PLC0415  (only a snapshot needs it)

        is_first, self._saved_at = not self._saved_at, self._num_updates
        for sigma_rel, average in zip(self.sigma_rels, self._averages, strict=True):
            weights, frozen = {}, average.without_average() if is_first else {}
            for name, tensor in {**frozen, **average.state_dict()["averaged_weights"]}.items():
                complete = tensor.full_tensor() if is_dtensor(tensor) else tensor  # all processes gather it
                if state.rank == 0:
                    dtype = average_dtype(complete.dtype) or complete.dtype
                    weights[name] = complete.detach().to("cpu", dtype, copy=True).contiguous()
            if state.rank == 0:
                path = self._folder(state) / f"updates-{self._num_updates:09}-sigma-{sigma_rel}.safetensors"
                copied = {"copied": json.dumps(average.held)}
                write_atomically(partial(save_file, weights, metadata=copied), path)


def snapshots(folder: Path) -> list[Snapshot]:
    """Return the snapshots in a folder, in the order of their updates."""
    found = [(match, path) for path in folder.glob("updates-*") if (match := _NAME.fullmatch(path.name))]
    return sorted(Snapshot(int(match[1]), float(match[2]), path) for match, path in found)


@torch.no_grad()
def post_hoc_ema(
    folder: str | os.PathLike[str], sigma_rel: float = 0.05, num_updates: int | None = None
) -> dict[str, Tensor]:
    """Return an average of any width from the snapshots of :class:`PostHocEMA` (arXiv:2312.02696).

    See :func:`composer.functional.post_hoc_weights`. One snapshot at a time is in memory. Nothing is written.

    Args:
        folder: The folder of the snapshots.
        sigma_rel: The width, the standard deviation of the average's profile as a fraction of the training.
        num_updates: The number of batches after which the average is wanted, that of a snapshot; of the last one if
            None.

    Returns:
        The weights by name, on the CPU. Tied weights occur once: load them by
        ``model.load_state_dict(weights, strict=False)``. Buffers other than running means and variances are those
        of the last snapshot.

    Raises:
        TypeError: A value is of another type.
        ValueError: There are no snapshots, one is damaged or of another model, or they do not determine the average.

    Example:
        >>> import tempfile
        >>> from composer.core import Engine, State
        >>> model, folder = torch.nn.Linear(2, 1), tempfile.mkdtemp()
        >>> state = State(model)
        >>> engine = Engine(state, algorithms=PostHocEMA(folder, snapshot_interval="2ba"))
        >>> engine.run_event("fit_start")
        >>> for _ in range(8):
        ...     state.timestamp = state.timestamp.to_next_batch()  # after a step
        ...     engine.run_event("batch_end")
        >>> weights = post_hoc_ema(folder, sigma_rel=0.08)
        >>> torch.allclose(weights["weight"], model.weight)
        True
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  (only snapshots need it)

    found = snapshots(Path(folder))
    if not found:
        raise ValueError(f"folder must have snapshots of PostHocEMA, got {os.fspath(folder)!r} without any.")
    last = [one for one in found if num_updates is None or one.num_updates <= num_updates]
    found = last or found  # the next function raises an error for a time before the first one
    counts, widths = [one.num_updates for one in found], [one.sigma_rel for one in found]
    factors = cf.post_hoc_weights(counts, widths, sigma_rel, num_updates)
    total, weights = dict[str, Tensor](), dict[str, Tensor]()
    for snapshot, factor in zip(found, factors.tolist(), strict=True):
        try:
            with safe_open(snapshot.path, "pt") as file:
                # Those that are missing were frozen, and have the value of a former snapshot.
                weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
                copied = json.loads((file.metadata() or {}).get("copied", "[]"))
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"The snapshot {snapshot.path} cannot be read: {error}") from None
        if total and {name: one.shape for name, one in weights.items()} != {n: one.shape for n, one in total.items()}:
            raise ValueError(f"The snapshot {snapshot.path} is of another model. Use one folder for each training.")
        for name, tensor in weights.items():
            if average_dtype(tensor.dtype) is None or name in copied:
                total[name] = tensor
            else:
                total[name] = total[name].add_(tensor, alpha=factor) if name in total else tensor * factor
    return total

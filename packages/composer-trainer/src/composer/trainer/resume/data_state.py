"""Save and restore the state of the user's own datasets, samplers and loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from composer.core.serialization import from_data
from composer.trainer.resume.own_state import OwnState, check_own_state, warn_of_misfits

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from composer.core import DataSpec

__all__ = ["DataState", "check_data_state", "data_components"]

_PARTS = {"now", "at_begin", "between"}


def data_components(loader: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the components of a loader that load samples, and those that choose indices, by name.

    Example:
        >>> loading, choosing = data_components(DataLoader([1, 2, 3]))
        >>> list(loading), list(choosing)
        (['dataset', 'collate_fn'], ['batch_sampler', 'sampler'])
    """
    if not isinstance(loader, DataLoader):
        return {}, {}
    choosing = {} if isinstance(loader.dataset, IterableDataset) else _named(loader, "batch_sampler", "sampler")
    return _named(loader, "dataset", "collate_fn"), choosing


def _named(owner: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in names if getattr(owner, name) is not None}


class DataState:
    """The state of a loader's components in attributes.

    Components that are replayed on resume (a sampler, a stream, a loader of the user's own) are saved as they were at
    the start of the epoch. Others (a map-style dataset, ``collate_fn``) are saved as they are.

    Args:
        spec: The loader.
        skips: Whether an epoch can start in its middle without loading the batches before.
    """

    def __init__(self, spec: DataSpec, *, skips: bool) -> None:
        loader = spec.dataloader
        self._now, self._replayed, self._copied = OwnState(), OwnState(replayed=True), OwnState()
        self._at_begin: dict[str, Any] = {}
        now = _named(spec, "batch_transforms", "microbatch_transforms")
        loading, choosing = data_components(loader)
        saves_itself = callable(getattr(loader, "state_dict", None))
        if saves_itself:
            loading, choosing = {}, {}
        elif isinstance(loader, DataLoader) and loader.num_workers and (skips or loader.persistent_workers):
            # Workers have copies. Workers that are not persistent are copied again for each epoch.
            self._copied.watch(loading)
            loading = {}
        if skips:
            now |= loading
        elif not saves_itself:
            choosing = loading or {} if isinstance(loader, DataLoader) else {"train_dataloader": loader}
        self._now.watch(now)
        self._replayed.watch(choosing, leave_out=now.values())

    def begin_epoch(self) -> None:
        """Store the state from which the epoch is replayed."""
        self._at_begin = self._replayed.to_data()

    def to_data(self, *, in_epoch: bool, is_checked: bool) -> dict[str, Any]:
        """Return the changes.

        Args:
            in_epoch: Whether a resumed run replays the epoch from its beginning.
            is_checked: Whether a resumed run draws the order of a finished epoch again, to compare it.
        """
        data = {"now": self._now.to_data()}
        if in_epoch or is_checked:
            data["at_begin"] = self._at_begin
        return data if in_epoch else data | {"between": self._replayed.to_data()}

    def report(self) -> None:
        """Warn once about each attribute that cannot be saved."""
        self._now.report()
        self._replayed.report()
        self._copied.report(dict.fromkeys(self._copied.generators(), "is copied into each worker process"))

    def load_at_begin(self, data: Mapping[str, Any], device: torch.device) -> bool:
        """Restore replayed components before the epoch starts, and return whether their state was saved."""
        self._at_begin = dict(data.get("at_begin", {}))
        warn_of_misfits(self._replayed.load(self._at_begin, device))
        return bool(self._at_begin)

    def load(self, data: Mapping[str, Any], device: torch.device, *, in_epoch: bool) -> None:
        """Restore the other components after the epoch has started, or all between two epochs."""
        if not in_epoch:
            warn_of_misfits(self._replayed.load(data.get("between", {}), device))
        warn_of_misfits(self._now.load(data.get("now", {}), device))


def check_data_state(data: Any, path: str) -> None:
    """Raise a ValueError that begins with ``path`` if data is not what :meth:`DataState.to_data` returns."""
    for part, state in from_data(data, dict[str, Any], path).items():
        if part not in _PARTS:
            raise ValueError(f"{path}: unknown field {part!r}.")
        check_own_state(state, f"{path}.{part}")

"""The batches that a loader returns next, with a look ahead."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from composer.distributed.samplers import END
from composer.trainer.resume.contract import has_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from composer.core import Batch

__all__ = ["Upcoming"]


class Upcoming:
    """Batches, each with whether it counts, of which the next one can be loaded to find out whether there is one.

    Args:
        loader: The loader.
        batches: Its batches.
    """

    def __init__(self, loader: Any, batches: Iterator[tuple[Batch, bool]]) -> None:
        self._loader = loader
        self.start(batches)

    def start(self, batches: Iterator[tuple[Batch, bool]]) -> None:
        """Continue with other batches of the loader."""
        self._batches, self._state_before = batches, None
        self._ahead: tuple[Batch, bool] | None = None

    def next(self) -> tuple[Batch, bool]:
        """Return the next batch; ``END`` if there is none."""
        found, self._ahead = self._ahead or next(self._batches, _NONE_LEFT), None
        return found

    def has_next(self) -> bool:
        """Load the next batch, and return whether there is one."""
        self._state_before = copy.deepcopy(self.loader_state())  # a loader may change it in place
        self._ahead = next(self._batches, None)
        return self._ahead is not None

    def loader_state(self) -> Any:
        """Return the state of a loader with a ``state_dict()`` from which it returns the next batch; else None."""
        if self._ahead is not None:
            return self._state_before
        return self._loader.state_dict() if has_state(self._loader) else None


_NONE_LEFT = (END, True)

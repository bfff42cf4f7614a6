"""What a checkpoint can hold."""

from __future__ import annotations

from typing import Any

__all__ = ["Serializable"]


class Serializable:
    """Something whose progress is saved with a run, as plain data (numbers, text, lists, dictionaries) and tensors.

    Example:
        >>> Serializable().state_dict()
        {}
    """

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to go on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned.

        Raises:
            ValueError: ``state`` holds something, and this object has nothing to put it in.
        """
        if state:
            raise ValueError(f"{type(self).__name__} saves nothing and cannot load {sorted(state)}.")

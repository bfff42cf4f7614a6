"""Sections of ``parallelism_config``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs
import torch

__all__ = ["Settings"]


class Settings:
    """Settings in one section of ``parallelism_config``."""

    section: ClassVar[str]
    hint: ClassVar[str] = ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the settings of a dictionary.

        Raises:
            ValueError: The dictionary contains a key that is not a setting.
        """
        known = [field.name for field in attrs.fields(cls)]  # type: ignore[arg-type]  # subclasses are attrs classes
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise ValueError(
                f"parallelism_config[{cls.section!r}] takes {', '.join(known)}, got {', '.join(map(repr, unknown))}."
                f"{cls.hint}"
            )
        return cls(**config)

    def to_plain(self) -> dict[str, Any]:
        """Return the settings as plain data, which is equal in processes with the same settings."""
        return {name: _plain(value) for name, value in attrs.asdict(self, recurse=False).items()}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, type):
        return value.__name__
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [*map(_plain, value)]
    if hasattr(value, "mesh_dim_names"):  # a DeviceMesh, which may be a part of one and then has other ranks elsewhere
        return f"{value.mesh_dim_names} {tuple(value.shape)}"
    # The repr of other objects, such as functions and styles of torch, may contain an address.
    return value if value is None or isinstance(value, (int, str, torch.dtype)) else type(value).__name__

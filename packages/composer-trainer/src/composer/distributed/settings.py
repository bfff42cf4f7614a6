"""Sections of ``parallelism_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs

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

"""Losses under the names that people know; the functions live in :mod:`composer.functional`."""

from composer.functional import soft_cross_entropy

__all__ = ["soft_cross_entropy"]

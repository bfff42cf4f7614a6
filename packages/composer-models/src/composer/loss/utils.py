"""Targets as class ids or as probabilities; the functions live in :mod:`composer.functional`."""

from composer.functional import check_for_index_targets, ensure_targets_one_hot, infer_target_type

__all__ = ["check_for_index_targets", "ensure_targets_one_hot", "infer_target_type"]

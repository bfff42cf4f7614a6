"""Augmentations: functions that change a batch before the forward pass."""

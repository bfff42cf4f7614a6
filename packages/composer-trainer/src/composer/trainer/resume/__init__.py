"""Exact resume: what a checkpoint contains besides the state of the run, and how it is restored."""

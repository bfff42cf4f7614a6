"""The side of a trainer: what it does to serve algorithms."""

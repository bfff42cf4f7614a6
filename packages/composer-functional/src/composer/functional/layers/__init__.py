"""Layers: the modules that surgery inserts into a model."""

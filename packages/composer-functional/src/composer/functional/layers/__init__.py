"""The modules that surgery puts into a model."""

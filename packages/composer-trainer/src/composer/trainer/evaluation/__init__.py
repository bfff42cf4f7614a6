"""Evaluation and prediction, and the metrics of both and of the training."""

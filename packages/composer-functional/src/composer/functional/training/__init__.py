"""Functions that change targets, gradients and weights during training."""

"""What changes targets, gradients and weights during training."""

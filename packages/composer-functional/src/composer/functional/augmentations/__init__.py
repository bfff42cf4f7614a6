"""What changes a batch before the model sees it."""

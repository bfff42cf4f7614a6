"""What edits a model in place."""

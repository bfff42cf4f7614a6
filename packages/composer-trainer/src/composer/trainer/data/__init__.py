"""The data to train on: its settings, its batches and their order."""

"""Checkpoints: saved asynchronously and atomically, restored into any split of the model."""

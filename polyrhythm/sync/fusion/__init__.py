"""Tensor fusion: which gradients travel together, and in which order."""

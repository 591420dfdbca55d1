"""Samples: in which order they come, and how they are loaded."""

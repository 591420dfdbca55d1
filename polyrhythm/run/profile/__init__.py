"""Measure a torch model: what its layers take in time and bytes."""

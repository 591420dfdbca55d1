"""Benchmark: the adaptive schedule against 1F1B on slow and changing networks."""

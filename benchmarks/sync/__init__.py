"""Benchmark: every sync policy against all-reduce, with stragglers."""

"""Benchmarks: each measures two sides in one run and reports their ratio."""

from benchmarks.registry import names, print_names, run

__all__ = ["names", "print_names", "run"]

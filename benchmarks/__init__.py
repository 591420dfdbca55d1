"""How fast, or how true: one file per benchmark, each a ratio of two things in one run."""

from benchmarks.registry import names, print_names, run

__all__ = ["names", "print_names", "run"]

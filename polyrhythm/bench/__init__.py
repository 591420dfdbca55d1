"""How fast, or how true: one file per benchmark, each a ratio of two things in one run."""

from polyrhythm.bench.registry import names, run

__all__ = ["names", "run"]

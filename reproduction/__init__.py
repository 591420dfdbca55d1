"""The figures that the five papers print, beside those that this code gives in virtual time."""

from reproduction.registry import print_names, run

__all__ = ["print_names", "run"]

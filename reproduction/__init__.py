"""Figures that five papers print, compared with those that this code gives in virtual time."""

from reproduction.registry import print_names, run

__all__ = ["print_names", "run"]

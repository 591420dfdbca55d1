"""Decoupled all-reduce: reduce-scatter during backward, all-gather during forward (DeAR)."""

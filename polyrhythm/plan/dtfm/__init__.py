"""Placement by DT-FM's cost: our search with its bound, and the paper's search as a reference."""

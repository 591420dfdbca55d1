"""Measure a cluster: its devices, and the links between every two of them."""

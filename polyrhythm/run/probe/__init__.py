"""Probe a cluster: measure its devices, and the link between every two of them."""

"""Luo et al., "Prague", ASPLOS 2020: figures 16 to 23."""

"""Describe clusters, models and scenarios as plain data."""

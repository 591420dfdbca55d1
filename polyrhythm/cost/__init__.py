"""Costs as pure functions: seconds and bytes from measured numbers."""

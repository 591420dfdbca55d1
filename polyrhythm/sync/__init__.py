"""Synchronization: policies that form groups of workers, and the scheduler that drives them."""

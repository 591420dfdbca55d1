"""Schedules: the order of actions of every stage."""

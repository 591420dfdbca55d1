"""The simulator: the same plans, schedules and policies in virtual time."""

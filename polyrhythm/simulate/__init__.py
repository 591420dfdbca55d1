"""Do it in virtual time: the same plans, schedules and policies, on a clock that costs nothing."""

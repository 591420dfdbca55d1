"""Ada-Grouper: kFkB on preempted networks, from the schedules and the tuner that also train."""

"""Ada-Grouper: kFkB on preempted networks."""

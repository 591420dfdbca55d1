"""How good the planner's plans are, and what they take to find."""

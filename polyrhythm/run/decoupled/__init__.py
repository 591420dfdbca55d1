"""All-reduce in two parts: reduce-scatter during backward, all-gather during forward (DeAR)."""

"""How the average of a group is exchanged, and what other ways would cost."""

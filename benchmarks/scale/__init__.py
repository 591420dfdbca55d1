"""How many workers can be simulated, and in what time."""

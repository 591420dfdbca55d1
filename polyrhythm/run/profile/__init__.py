"""Profile a torch model: time and memory of its layers."""

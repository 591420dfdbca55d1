"""What we have: clusters, models and scenarios as plain data."""

"""What group averaging gains on machines that are slow."""

"""What a schedule gains on slow and changing networks."""

"""The scheduler as a service, and how a worker speaks to it."""

"""The coordinator: the scheduler as a service, and the client of a worker."""

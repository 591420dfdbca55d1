"""Sample order, readers and loaders."""

"""Keep replicas consistent by averaging: in groups, over all workers, or through a server."""

"""The loss of workers: what it costs, and whether jobs survive many."""

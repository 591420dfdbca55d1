"""What benchmarks share: a worker pool, emulated compute, pipeline jobs, bars and results."""

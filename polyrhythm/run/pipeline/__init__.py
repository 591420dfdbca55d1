"""Pipeline parallelism: this process runs one stage of a model."""

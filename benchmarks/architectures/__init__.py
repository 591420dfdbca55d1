"""Which architectures of transformers split into stages without a name given."""

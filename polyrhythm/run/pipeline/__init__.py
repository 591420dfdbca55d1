"""One model in stages: this process runs one of them."""

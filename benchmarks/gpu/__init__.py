"""One GPU: the Trainer, Pipeline and DistributedOptimizer against plain PyTorch."""

"""Tensor fusion: which gradients share a bucket, and in which order buckets are sent."""

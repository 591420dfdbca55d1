"""Benchmark: reduce-scatter and all-gather apart (DeAR) against DDP and FSDP2 on slow links."""

"""Decoupled all-reduce against DDP and FSDP2, where gradients travel slowly."""

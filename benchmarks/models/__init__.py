"""Hugging Face models and data: lines, parity, speed."""

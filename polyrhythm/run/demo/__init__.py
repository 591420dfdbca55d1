"""The training job of `polyrhythm demo`: a small byte-level GPT on real text."""

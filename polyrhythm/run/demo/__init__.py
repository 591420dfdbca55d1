"""What `polyrhythm demo` trains: a small byte-level GPT on real text."""

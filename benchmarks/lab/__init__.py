"""Is the emulated network what its description says?"""

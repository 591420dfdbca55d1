"""How accurate the emulated network is."""

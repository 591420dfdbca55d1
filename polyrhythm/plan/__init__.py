"""Plans: which stages and layers each device runs."""

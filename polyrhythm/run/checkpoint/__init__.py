"""The state of a run on disk: saved while it trains, whole or not at all, for any cut."""

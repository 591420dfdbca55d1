"""What happened: progress, metrics and traces from the event log."""

"""Show a run from its event log: progress, metrics, reports, traces, plan pictures."""

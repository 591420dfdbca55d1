"""Replicas that keep together by averaging: in groups, all at once, or through a server."""

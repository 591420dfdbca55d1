"""Pipelines and messages in virtual time, action by action: compiled, since there are millions."""

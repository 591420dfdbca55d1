"""The engine: pipelines and messages in virtual time, action by action, in compiled code."""

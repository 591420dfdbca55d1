"""DeAR's evaluation, reproduced from its set-up."""

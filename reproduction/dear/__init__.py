"""The evaluation of DeAR, reproduced from its set-up."""

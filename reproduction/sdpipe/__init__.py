"""The evaluation of SDPipe, reproduced from its set-up."""

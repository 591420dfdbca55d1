"""The evaluation of Prague, reproduced from its set-up."""

"""SDPipe's evaluation, reproduced from its set-up."""

"""Jobs in the lab that compute by sleeping: processes, messages and averages are real."""

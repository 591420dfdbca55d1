"""Do it for real: processes, tensors and networks (torch lives here)."""

"""Execute plans with torch: processes, tensors and networks."""

"""What things take: seconds and bytes, from measured numbers."""

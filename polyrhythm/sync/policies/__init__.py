"""Group policies: who averages with whom, one file each."""

"""Group policies: which workers average together, one file each."""

"""Communication between processes: launch, process groups, collectives."""

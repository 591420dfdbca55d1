"""In which order: the actions of every stage."""

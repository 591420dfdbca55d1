"""Who does what: which layers and which worker each device gets."""

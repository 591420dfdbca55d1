"""Where events go: JSON lines and the progress on a screen, of a training and of a simulation."""

"""The whole of it against torch alone: a stormy world, a quiet room, saving, and a script."""

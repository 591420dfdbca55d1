"""The Trainer against torch."""

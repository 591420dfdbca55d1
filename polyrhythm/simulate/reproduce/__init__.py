"""The five papers' results beside ours, from the code that also plans and trains."""

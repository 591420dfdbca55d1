"""The search that DT-FM publishes, as a reference: nothing here is made better than it was."""

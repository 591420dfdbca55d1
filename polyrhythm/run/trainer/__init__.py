"""One object that trains a model: plan, pipeline, averages, data and checkpoints together."""

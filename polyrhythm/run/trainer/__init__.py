"""The Trainer: plan, pipeline, sync mode, data and checkpoints of one training job."""

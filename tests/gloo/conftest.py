"""Tests that fork workers from the process that runs the tests."""

import torch

# Threads of OpenMP do not survive a fork: once this process had started them, a worker that wants
# some would wait for ever. With one thread none is started, whatever a test computes here.
torch.set_num_threads(1)

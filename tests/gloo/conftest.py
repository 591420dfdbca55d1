"""Settings for tests that fork workers from the test process."""

import torch

# OpenMP threads do not survive a fork: if this process had started some, a forked worker that needs
# them would wait forever. With one thread none is started, whatever a test computes here.
torch.set_num_threads(1)

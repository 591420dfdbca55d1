"""The model whose compute is a sleep: a layer for each stage. `polyrhythm profile` measures it."""

import torch
from torch import Tensor, nn

from benchmarks.predict.setting import BACKWARD, FORWARDS, NUM_ACTIVATIONS, NUM_WEIGHTS
from benchmarks.sleeping.stage import SleepingStage

FACTORY = f"{__name__}:sleeping_model"


def sleeping_model() -> tuple[nn.Sequential, Tensor]:
    """With an example of one micro-batch."""
    layers = [
        SleepingStage(
            forward_takes=forward,
            backward_takes=BACKWARD * forward,
            num_weights=NUM_WEIGHTS,
            grace=0.0,  # each is measured by itself
        )
        for forward in FORWARDS
    ]
    for layer in layers:
        layer.begin(0.0)
    return nn.Sequential(*layers), torch.ones(1, NUM_ACTIVATIONS)

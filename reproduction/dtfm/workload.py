"""What is trained: GPT3-XL, 24 layers or more, in the numbers that a step is made of.

The paper's section 4: "the standard GPT3-XL architecture", 24, 32 and 40 layers, batches of 1024,
2048 and 4096. Width and length are those of Brown et al., arXiv:2005.14165, table 2.1. Its runtime
cuts batches into sequences, sends activations and gradients in fp16, and computes every layer's
forward again before its backward (DS3Lab/DT-FM, gpt3_xl_pp8_dp8.sh and gpt_modules.py).
"""

from typing import NamedTuple

from polyrhythm.types import Bytes, Seconds

HIDDEN = 2048
SEQUENCE = 2048  # tokens
NUM_BYTES = 2  # of a number, fp16

# Attention's four and the perceptron's two matrices with biases, and two normalisations.
PARAMETERS_PER_LAYER = 12 * HIDDEN**2 + 13 * HIDDEN
EMBEDDED = (50257 + SEQUENCE) * HIDDEN  # parameters for words and places, in the first stage
# Of a sequence: two for each weight and token, and the scores and sums of attention.
FORWARD_FLOPS_PER_LAYER = 24 * SEQUENCE * HIDDEN**2 + 4 * SEQUENCE**2 * HIDDEN
BACKWARD = 3  # forwards: the one that is repeated, and twice that for the gradients
MODEL_FLOPS = 3  # forwards that count for PFLOPS: what is repeated does not

# "V100 GPUs peak at 125 TeraFLOPS", "50% device utilization" (section 1). Megatron's authors
# measured 62.4 of them on a V100 with a model of this size (nv-adlr.github.io/MegatronLMV1).
GPU_FLOPS = 0.5 * 125e12

ACTIVATION_BYTES: Bytes = SEQUENCE * HIDDEN * NUM_BYTES  # of a sequence, between two layers
NUM_GPUS = 64


class Workload(NamedTuple):
    num_layers: int
    batch: int  # sequences in a step, of all pipelines


WORKLOADS = tuple(
    Workload(num_layers, batch) for num_layers in (24, 32, 40) for batch in (1024, 2048, 4096)
)


def forward_time(num_layers: float) -> Seconds:
    """Of one sequence on one GPU."""
    return num_layers * FORWARD_FLOPS_PER_LAYER / GPU_FLOPS


def gradient_bytes(num_layers: int, num_stages: int) -> tuple[float, ...]:
    """Of each stage; layers are dealt evenly."""
    layers = num_layers / num_stages * PARAMETERS_PER_LAYER * NUM_BYTES
    return (layers + EMBEDDED * NUM_BYTES, *[layers] * (num_stages - 1))


def petaflops(workload: Workload, iteration: Seconds) -> float:
    """Of all GPUs together."""
    flops = MODEL_FLOPS * FORWARD_FLOPS_PER_LAYER * workload.num_layers * workload.batch
    return flops / iteration / 1e15

"""DeAR's evaluation: five models on 64 GPUs over two networks, every step played through.

Source: Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
Pipelining", ICDCS 2023.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from polyrhythm.cost.decoupled import Ring
from polyrhythm.sync.fusion.timeline import StepEstimate
from polyrhythm.types import BytesPerSecond
from reproduction.claim import Plot, Reproduction, Row
from reproduction.dear import fusion, methods, overlap, search, speedups
from reproduction.dear.setting import (
    EFFICIENCY,
    ETHERNET,
    INFINIBAND,
    MODELS,
    NETWORKS,
    START,
    WORKERS,
    Model,
    Network,
    Work,
    gpu_at,
    work,
)

_NAMED_FOR: BytesPerSecond = 100e9 / 8

_SETUP = """\
**The paper's set-up** (section VI.A): 16 nodes with 4 RTX 2080 Ti each, joined by 10 Gb/s Ethernet
and by 100 Gb/s InfiniBand; PyTorch 1.8 and NCCL 2.10, single precision; five models with the
batches of Table I, images of 224 x 224, sentences of 64 words.

**Of the project**: steps are played through layer by layer by `sync/fusion/timeline.py` (the rules
of WFBP, MG-WFBP, ByteScheduler and DeAR) with rings by equations 3 to 5 and bounds by equations 6
to 9 (`cost/decoupled.py`); DeAR-BO is the tuner that also trains. The simulator is not called: one
step of equal GPUs has no events but these. **Its own** are the times of layers and the networks.

- Layers and tensors are those that Table I counts.
- Compute: the paper prints no time of a step. A product takes its operations at
  {efficiency:.0f} % of the 13.45 TFLOPS of the data sheet, or its numbers at as much of the 616
  GB/s if that is longer; all else takes the numbers that it reads and writes. That is a usual
  efficiency, the same for all. For ResNet-50 it makes {images:.0f} images per second; Lambda
  Labs measured 294 with TensorFlow.
- 10GbE: 10 Gb/s. The latency of a message, {latency:.0f} us, is what the all-reduces of 0.5 and
  1 MB that section II.D states (3.9 and 4.5 ms) take beyond their bytes.
- 100GbIB: the paper states neither latency nor what the ring reaches. The code that the authors
  published with SPD-KFAC (ICDCS 2021) has constants of a broadcast among 64 workers:
  {start:.3f} ms and {per_byte:.3f} ns per byte; so {ib_latency:.1f} us a message, and
  {ib_bandwidth:.1f} GB/s. It does not name the network; that it is this one is an assumption.
  A 2080 Ti cannot reach another one, and every hop goes through the memory of the host, so that
  less than half of 100 Gb/s would not be odd.
- Buffers: 25 MB for all in Table II and Fig. 7, 64 MB for Horovod and 5 MB for DeAR-FB in Fig. 9,
  as the text says. DDP's first buffer has 1 MB. ByteScheduler sends tensors in pieces of 4 MB, and
  MG-WFBP decides by the latency and bandwidth that its code has for 64 workers, as in the authors'
  scripts. Horovod and ByteScheduler agree on each message beforehand, up and down a binary tree.
- DeAR-BO makes {trials} trials, as many as the authors' code.

**Not said in the text**, so taken in this way: Fig. 6's network (both), the models of Fig. 9 and 10
(the three that are named), the batches of Fig. 11 (16, 32, 64). Left out: launches of kernels,
copies into buffers, the optimizer, other traffic. Gathers follow one another at once here; the
paper starts the next one when a layer begins. The text prints no figures of Fig. 8, 10 and 11, only
who is better; and the seconds that a trial takes (0.207) depend on the machine.

**Readings chosen with the figures known**, and what others would give:

- the efficiency: with 70 or 90 % DeAR is {gain_70:.2f} or {gain_90:.2f} times as fast as the others
  on 10GbE, on average (printed 1.36, here {gain:.2f});
- InfiniBand's bandwidth: with the 12.5 GB/s that it is named for, S_max of BERT-Large would be
  {named:.1f} (printed 51.8, here {s_max:.1f});
- WFBP sends layers, as the paper draws it; the authors' code sends tensors, with which DeAR without
  fusion would gain up to {by_tensors:.2f} (printed 1.19, here {by_layers:.2f});
- MG-WFBP goes by the constants in its code: if it knew the network as it is, DeAR would gain
  {informed:.2f} over it at the most on 10GbE (printed of all 1.83, here {misled:.2f} over it).
"""


def reproduce(say: Callable[[str], None]) -> Reproduction:
    rows: list[Row] = []
    plots: list[Plot] = []
    for told, part in (
        ("halves of all-reduces, and what compute hides", overlap),
        ("with tensor fusion and without", fusion),
        ("speedups of five models on two networks", speedups),
        ("searches for the size of buffers", search),
    ):
        say(told)
        rows += part.rows()
        plots += part.plots()
    return Reproduction(
        paper="dear",
        title="DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce "
        "Pipelining",
        source="Zhang et al., ICDCS 2023",
        setup=setup(),
        rows=tuple(rows),
        plots=tuple(plots),
    )


def setup() -> str:
    """With what hangs on the readings, computed now."""
    first, largest = MODELS[0], MODELS[-1]
    ethernet, infiniband = ETHERNET.ring, INFINIBAND.ring
    named = Ring(latency=infiniband.latency, bandwidth=_NAMED_FOR)
    merging = [model for model in MODELS if model is not largest]  # which it had no memory for
    return _SETUP.format(
        efficiency=100 * EFFICIENCY,
        images=first.batch / work(first).compute,
        latency=1e6 * ethernet.latency,
        start=1e3 * START,
        per_byte=1e9 / infiniband.bandwidth,
        ib_latency=1e6 * infiniband.latency,
        ib_bandwidth=infiniband.bandwidth / 1e9,
        trials=methods.TRIALS,
        gain=fmean(speedups.gains(ETHERNET).values()),
        gain_70=fmean(speedups.gains(ETHERNET, gpu_at(0.7)).values()),
        gain_90=fmean(speedups.gains(ETHERNET, gpu_at(0.9)).values()),
        named=work(largest).bounds(named).max_speedup(WORKERS),
        s_max=work(largest).bounds(infiniband).max_speedup(WORKERS),
        by_tensors=max(_gains(methods.wait_free_by_tensors, methods.dear_unfused, NETWORKS)),
        by_layers=max(_gains(methods.wait_free, methods.dear_unfused, NETWORKS)),
        informed=max(_gains(methods.mg_wfbp_informed, methods.dear_fixed, [ETHERNET], merging)),
        misled=max(_gains(methods.mg_wfbp, methods.dear_fixed, [ETHERNET], merging)),
    )


def _gains(
    rival: Callable[[Work, Network], StepEstimate],
    dear: Callable[[Work, Network], StepEstimate],
    networks: Iterable[Network],
    models: Sequence[Model] = MODELS,
) -> list[float]:
    return [
        rival(work(model), network).seconds / dear(work(model), network).seconds
        for network in networks
        for model in models
    ]

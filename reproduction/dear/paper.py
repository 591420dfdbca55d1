"""DeAR's evaluation: the timeline of one step, for five models on 64 GPUs over two networks.

Source: Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
Pipelining", ICDCS 2023.
"""

from collections.abc import Callable
from statistics import fmean

from polyrhythm.types import BytesPerSecond
from reproduction.dear import methods, overlap, search, speedups, testbed
from reproduction.dear.methods import gain
from reproduction.dear.ring import Ring
from reproduction.dear.testbed import ETHERNET, INFINIBAND, MODELS, NUM_WORKERS, compute_times
from reproduction.paper_row import PaperRow, Plot, Reproduction

_NOMINAL_INFINIBAND: BytesPerSecond = 100e9 / 8

_SETUP = """\
**The paper's set-up** (section VI.A): 16 nodes with 4 RTX 2080 Ti each, connected by 10 Gb/s
Ethernet and by 100 Gb/s InfiniBand; PyTorch 1.8 and NCCL 2.10, single precision; five models with
the batches of Table I, images of 224 x 224, sentences of 64 words.

**From the project**: the rules that form buckets, and for DeAR-BO the tuner that training uses. The
simulator is not used: one step of equal GPUs has no other events. **Written for this page**: the
timeline of a step, layer by layer (`reproduction/dear/timeline.py`: the rules of WFBP,
ByteScheduler and DeAR; `methods.py`: that of MG-WFBP), rings by equations 3 to 5 and bounds by
equations 6 to 9 (`reproduction/dear/ring.py`), the times of layers and the networks.

- Layers and tensors are those that Table I counts.
- Compute: the paper prints no time of a step. A matrix product takes the longer of two times: its
  operations at {efficiency:.0f} % of the data sheet's 13.45 TFLOPS, or its elements at
  {efficiency:.0f} % of the 616 GB/s. All other operators take the time to read and write their
  elements. The efficiency is a usual one, and the same for all models. It gives {images:.0f} images
  per second for ResNet-50; Lambda Labs measured 294 with TensorFlow.
- 10GbE: 10 Gb/s. The latency of a message, {latency:.0f} us, is what the all-reduces of 0.5 and
  1 MB in section II.D (3.9 and 4.5 ms) take beyond their bytes.
- 100GbIB: the paper states neither the latency nor the bandwidth that the ring reaches. The code
  that the authors published with SPD-KFAC (ICDCS 2021) has constants of a broadcast among 64
  workers: {start:.3f} ms and {per_byte:.3f} ns per byte, hence {ib_latency:.1f} us per message and
  {ib_bandwidth:.1f} GB/s. It does not name the network; that it is this one is an assumption. A
  2080 Ti has no peer access: every hop goes through the memory of the host, so less than half of
  100 Gb/s is plausible.
- Buckets: 25 MB for all systems in Table II and Fig. 7, 64 MB for Horovod and 5 MB for DeAR-FB in
  Fig. 9, as the text says. DDP's first bucket has 1 MB. ByteScheduler sends tensors in pieces of
  4 MB, and MG-WFBP decides by the latency and bandwidth that its code has for 64 workers, as in the
  authors' scripts. Horovod and ByteScheduler negotiate each message, up and down a binary tree.
- DeAR-BO makes {trials} trials, as many as the authors' code.

**Not stated by the paper**, and assumed here: both networks for Fig. 6, the three named models for
Figs. 9 and 10, batches of 16, 32 and 64 for Fig. 11. Left out: kernel launches, copies into
buckets, the optimizer, other traffic. All-gathers follow one another without a pause here; the
paper starts the next one when a layer begins. For Figs. 8, 10 and 11 the text prints no figures,
only which system is better. The seconds that a trial takes (0.207) depend on the machine.

**Readings chosen with the figures known**, and what other readings would give:

- The efficiency: with 70 or 90 % DeAR would be {gain_70:.2f} or {gain_90:.2f} times as fast as the
  other systems on 10GbE, on average (printed 1.36, here {gain:.2f}).
- The bandwidth of InfiniBand: with the nominal 12.5 GB/s, S_max of BERT-Large would be
  {nominal:.1f} (printed 51.8, here {s_max:.1f}).
- WFBP sends layers, as the paper draws it. The authors' code sends tensors, with which DeAR without
  fusion would gain up to {by_tensors:.2f} (printed 1.19, here {by_layers:.2f}).
- MG-WFBP uses the constants in its code. With the real latency and bandwidth, DeAR would gain at
  most {informed:.2f} over it on 10GbE (printed for all systems 1.83, here {misled:.2f} over it).
"""


def reproduce(log: Callable[[str], None]) -> Reproduction:
    rows: list[PaperRow] = []
    plots: list[Plot] = []
    for message, part in (
        ("reduce-scatter, all-gather, and what compute hides", overlap),
        ("speedups of five models on two networks", speedups),
        ("searches for the bucket size", search),
    ):
        log(message)
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
    """Return the set-up text, with what other readings of the paper would give."""
    first, largest = MODELS[0], MODELS[-1]
    ethernet, infiniband = ETHERNET.ring, INFINIBAND.ring
    nominal = Ring(latency=infiniband.latency, bandwidth=_NOMINAL_INFINIBAND)
    merging = [model for model in MODELS if model is not largest]  # MG-WFBP ran out of memory

    def unfused_gain(other: methods.Method) -> float:
        return max(
            gain(m, net, methods.dear_unfused, other) for net in testbed.NETWORKS for m in MODELS
        )

    def fused_gain(other: methods.Method) -> float:
        return max(gain(model, ETHERNET, methods.dear_fixed, other) for model in merging)

    return _SETUP.format(
        efficiency=100 * testbed.EFFICIENCY,
        images=first.batch / compute_times(first).compute,
        latency=1e6 * ethernet.latency,
        start=1e3 * testbed.BROADCAST_START,
        per_byte=1e9 / infiniband.bandwidth,
        ib_latency=1e6 * infiniband.latency,
        ib_bandwidth=infiniband.bandwidth / 1e9,
        trials=methods.NUM_TRIALS,
        gain=fmean(speedups.dear_gains(ETHERNET).values()),
        gain_70=fmean(speedups.dear_gains(ETHERNET, testbed.gpu_at(0.7)).values()),
        gain_90=fmean(speedups.dear_gains(ETHERNET, testbed.gpu_at(0.9)).values()),
        nominal=compute_times(largest).bounds(nominal).max_speedup(NUM_WORKERS),
        s_max=compute_times(largest).bounds(infiniband).max_speedup(NUM_WORKERS),
        by_tensors=unfused_gain(methods.wait_free_by_tensors),
        by_layers=unfused_gain(methods.wait_free),
        informed=fused_gain(methods.mg_wfbp_informed),
        misled=fused_gain(methods.mg_wfbp),
    )

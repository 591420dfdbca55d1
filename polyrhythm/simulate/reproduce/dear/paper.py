"""DeAR's evaluation: five models on 64 GPUs over two networks, every step played through.

Source: Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
Pipelining", ICDCS 2023.
"""

from collections.abc import Callable

from polyrhythm.simulate.reproduce.claim import Plot, Reproduction, Row
from polyrhythm.simulate.reproduce.dear import fusion, overlap, search, speedups

_SETUP = """\
**The paper's set-up** (section VI.A): 16 nodes with 4 RTX 2080 Ti each, joined by 10 Gb/s Ethernet
and by 100 Gb/s InfiniBand; PyTorch 1.8 and NCCL 2.10, single precision; five models with the
batches of Table I, images of 224 x 224, sentences of 64 words.

**Here** each step is played through layer by layer (`sync/fusion/timeline.py`, the rules of WFBP,
MG-WFBP, ByteScheduler and DeAR), with rings by equations 3 to 5, and bounds by equations 6 to 9
(`cost/decoupled.py`). The learnable layers and tensors are those that Table I counts.

- Compute: the paper prints no time of a step. A product takes its operations at 80 % of the
  13.45 TFLOPS of the data sheet, or its numbers at 80 % of the 616 GB/s if that is longer; all else
  takes the numbers that it reads and writes. 80 % is a usual efficiency, the same for all. For
  ResNet-50 it makes 269 images per second; Lambda Labs measured 294 with TensorFlow.
- 10GbE: 10 Gb/s. The latency of a message, 24 us, is what the all-reduces of 0.5 and 1 MB that
  section II.D states (3.9 and 4.5 ms) take beyond their bytes.
- 100GbIB: the paper states neither latency nor what the ring reaches. With the code of SPD-KFAC
  (ICDCS 2021) the authors published what they measured on 64 workers over 100 Gb/s InfiniBand: a
  broadcast takes 0.255 ms and 0.184 ns per byte; so 4.0 us a message, and 5.4 GB/s. That is less
  than half of 100 Gb/s: a 2080 Ti cannot reach another one, and every hop goes through the memory
  of the host.
- Buffers: 25 MB for all in Table II and Fig. 7, 64 MB for Horovod and 5 MB for DeAR-FB in Fig. 9,
  as the text says. DDP's first buffer has 1 MB. ByteScheduler sends tensors in pieces of 4 MB, and
  MG-WFBP decides by the latency and bandwidth that its code has for 64 workers, as in the authors'
  scripts. Horovod and ByteScheduler agree on each message beforehand, up and down a binary tree.
- DeAR-BO is the project's own tuner with ten trials, as many as the authors' code makes.

**Not said in the text**, so taken in this way: Fig. 6's network (both), the models of Fig. 9 and 10
(the three that are named), the batches of Fig. 11 (16, 32, 64). Left out: launches of kernels,
copies into buffers, the optimizer, other traffic. Gathers follow one another at once here; the
paper starts the next one when a layer begins. The text prints no figures of Fig. 8, 10 and 11, only
who is better; and the seconds that a trial takes (0.207) depend on the machine.

**What hangs on these choices**: with an efficiency of 70 or 90 % instead of 80, 56 or 61 of the 67
rows pass instead of 59. With 12.5 GB/s, which InfiniBand is named for, 57 do: S_max of BERT-Large
would be 64 (printed 51.8). WFBP sends layers here, as the paper draws it; the authors' code sends
tensors, with which DeAR would gain up to 1.73 (printed 1.19). If MG-WFBP knew the network as it is,
DeAR would gain 1.41 at the most (printed 1.83), not 1.63.
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
        setup=_SETUP,
        rows=tuple(rows),
        plots=tuple(plots),
    )

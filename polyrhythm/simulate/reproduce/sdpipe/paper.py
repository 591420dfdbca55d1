"""SDPipe's evaluation: two models on grids of A100s, with workers that fall asleep.

Source: Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware
Pipeline-parallel Training", PVLDB 16(9), 2023.
"""

from collections.abc import Callable

from polyrhythm.simulate.reproduce.claim import Reproduction
from polyrhythm.simulate.reproduce.sdpipe.group_sizes import figure_9
from polyrhythm.simulate.reproduce.sdpipe.throughput import figure_4, figure_6, plots, swept
from polyrhythm.simulate.reproduce.sdpipe.training import figures_5_and_7

_SETUP = """\
**The paper's set-up** (section 5.1): nodes of 8 A100 on 10 Gb Ethernet; ResNet-50 and BERT-base in
pipelines of M stages, N of them; a worker sleeps with probability 10 %, under A for 0.1 s (BERT:
0.2 s), under B for 0.3 s (0.6 s). P is 10, T is 1/N of an iteration. Figures are of 16 workers,
those of Fig. 6 of 64. The text prints seven ratios; of Fig. 4 and 6 it says who is faster.

**Here** pipelines, policies and scenarios are the project's own, in the simulator. Where the text
and the code that the authors published differ, the code counts, since the figures came from it:

- Pipelines are not flushed: stage s has M - s mini-batches of 64 samples in flight, and the weights
  of each. Grids (M x N) are 4 x 4, 2 x 8, 1 x 16 and, of 64 workers, 4 x 16. A pipeline is within
  a node. Sleeps are drawn before each forward and each backward.
- SDPipe is the policy `adaptive` with windows of 10 ms, the longest that the code opens. P counts
  ten updates of each worker there: 5 N groups of two. `SDPipe by its text` has `window = "paper"`
  and P of ten groups.
- AD-PSGD is a random matching in which both wait for each other; `AD-PSGD proper` is `pairwise`.
- HetPipe is `ssp` with a server on the first node, staleness M. It pushes each mini-batch and pulls
  each tenth, so 0.55 of the bytes travel each way. A worker waits for its push; in the code not.
- Compute: operations counted (`describe/resnet_work.py`, `transformer_work.py`) at half of the
  19.5 TFLOPS of the data sheet in single precision: CUDA 10.2 has no TF32. Half is usual: Lambda
  Labs' 294 images per second of ResNet-50 on an RTX 2080 Ti are 54 %.
- Network: a node's GPUs share 10 Gb/s, 50 us a message; a group's ring goes through a node once,
  and not at all if its members are in one node (NVLink, 300 GB/s). Averages begin when a backward
  has ended; in the code they begin during it.
- Fig. 5 and 7: a network of three hidden layers of 32 learns labels of a wider one (`converge.py`),
  with the times of ResNet-50 and BERT-base and gradients as stale as in the pipeline; SGD with
  momentum 0.9 for both. The target is the loss that All-Reduce has after half of 160 steps; three
  seeds. `Decentralised` is the mean of All-Reduce and AD-PSGD. For Fig. 7 the appendix' recording
  of 16 shared GPUs is played, pipeline by pipeline.
- Group sizes: the appendix' Fig. 9, read off its box plot.

**What hangs on these choices**: with T and P by the text, 16 of the 28 rows pass instead of 20: the
slowdowns do, but groups are so large that SDPipe hardly leads. With 35 or 70 % of the data sheet's
speed, 17 or 18 pass; if the recording is played in 480 steps of All-Reduce instead of 360, 19 do
(BERT-base 1.79), in 900 steps 20. With a network that costs nothing, SDPipe takes up to 5.5 times
as long under B, and is at most 2.0 times as fast as All-Reduce, 1.5 times as fast as AD-PSGD.
"""


def reproduce(say: Callable[[str], None]) -> Reproduction:
    times = swept(say)
    training, curves = figures_5_and_7(say)
    say("sizes of groups")
    sizes, boxes = figure_9()
    return Reproduction(
        paper="sdpipe",
        title="SDPipe",
        source="Miao et al., PVLDB 16(9), 2023",
        setup=_SETUP,
        rows=(*figure_4(times), *figure_6(times), *training, *sizes),
        plots=(*plots(times), *curves, *boxes),
    )

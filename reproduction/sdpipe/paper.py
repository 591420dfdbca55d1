"""SDPipe's evaluation: two models on grids of A100s, with workers that fall asleep.

Source: Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware
Pipeline-parallel Training", PVLDB 16(9), 2023.
"""

from collections.abc import Callable

from reproduction.claim import Reproduction
from reproduction.sdpipe.bars import plots
from reproduction.sdpipe.group_sizes import figure_9
from reproduction.sdpipe.models import BERT, RESNET
from reproduction.sdpipe.testbed import ALL_REDUCE, BY_TEXT, SDPIPE
from reproduction.sdpipe.throughput import (
    Times,
    figure_4,
    figure_6,
    greatest_lead,
    slowdown,
    swept,
)
from reproduction.sdpipe.training import TRACE_STEPS, figures_5_and_7

_SETUP = """\
**The paper's set-up** (section 5.1): nodes of 8 A100 on 10 Gb Ethernet; ResNet-50 and BERT-base in
pipelines of M stages, N of them; a worker sleeps with probability 10 %, under A for 0.1 s (BERT:
0.2 s), under B for 0.3 s (0.6 s). P is 10, T is 1/N of an iteration. Figures are of 16 workers,
those of Fig. 6 of 64. The text prints seven ratios; of Fig. 4 and 6 it says who is faster.

**Of the project**: the simulator with its policies, schedules and scenarios, and its convergence
mode. **Its own**: the testbed, and AD-PSGD as the authors built it (`matching.py`). Where the text
and the code that the authors published differ, the code counts, since the figures came from it:

- Pipelines are not flushed: stage s has M - s mini-batches of 64 samples in flight, and the weights
  of each. Grids (M x N) are 4 x 4, 2 x 8, 1 x 16 and, of 64 workers, 4 x 16. A pipeline is within
  a node. Sleeps are drawn before each forward and each backward.
- SDPipe is the policy `adaptive` with windows of 10 ms, the longest that the code opens. P counts
  ten updates of each worker there: 5 N groups of two. `SDPipe by its text` has `window = "paper"`
  and P of ten groups.
- AD-PSGD is a random matching in which both wait for each other; `AD-PSGD proper` is `pairwise`.
- HetPipe is `ssp` with a server on the first node, whose GPUs reach it inside; staleness M. It
  pushes each mini-batch and pulls each tenth, so 0.55 of the bytes travel each way. A worker waits
  for its push; in the code not.
- Compute: operations counted (`describe/resnet_work.py`, `transformer_work.py`) at half of the
  19.5 TFLOPS of the data sheet in single precision: CUDA 10.2 has no TF32. Half is usual: Lambda
  Labs' 294 images per second of ResNet-50 on an RTX 2080 Ti are 54 %.
- Network: a node's GPUs share 10 Gb/s, 50 us a message; a group's ring goes through a node once,
  and not at all if its members are in one node (NVLink, 300 GB/s). Averages begin when a backward
  has ended; in the code they begin during it.
- Fig. 5 and 7: a network of three hidden layers of 32 learns labels of a wider one (`converge.py`),
  with the times of ResNet-50 and BERT-base and gradients as stale as in the pipeline; SGD with
  momentum 0.9 for both. The target is the loss that All-Reduce has after 80 steps; three seeds.
  `Decentralised` is the mean of All-Reduce and AD-PSGD. For Fig. 7 the appendix' recording of 16
  shared GPUs is played, pipeline by pipeline.
- Group sizes: the appendix' Fig. 9, read off its box plot.

**Readings chosen with the figures known**, and what others would give:

- T and P are those of the published code. By the text, SDPipe takes {resnet_text:.2f} and
  {bert_text:.2f} times as long under B with ResNet-50 and BERT-base (printed 1.4, here {resnet:.2f}
  and {bert:.2f}); but groups are so large that it is at most {lead_text:.2f} times as fast as
  All-Reduce (printed 4.3, here {lead:.2f}).
- How long the recording of Fig. 7 lasts in steps: {trace_steps} of All-Reduce on equal workers.
  The paper does not say.
- What is trained instead of the two models, its learning rate, and the loss that is the target.
- Fig. 9 is read off a drawing, not printed; its rows say so. Its sleeps (B) are not stated.
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
        setup=_setup(times),
        rows=(*figure_4(times), *figure_6(times), *training, *sizes),
        plots=(*plots(times), *curves, *boxes),
    )


def _setup(times: Times) -> str:
    resnet, bert = RESNET.name, BERT.name
    return _SETUP.format(
        resnet=slowdown(times, resnet, SDPIPE),
        bert=slowdown(times, bert, SDPIPE),
        resnet_text=slowdown(times, resnet, BY_TEXT),
        bert_text=slowdown(times, bert, BY_TEXT),
        lead=greatest_lead(times, SDPIPE, ALL_REDUCE),
        lead_text=greatest_lead(times, BY_TEXT, ALL_REDUCE),
        trace_steps=TRACE_STEPS,
    )

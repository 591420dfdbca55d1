"""SDPipe's evaluation: two models on grids of A100s, with workers that sleep at random.

Source: Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware
Pipeline-parallel Training", PVLDB 16(9), 2023.
"""

from collections.abc import Callable

from reproduction.paper_row import Reproduction
from reproduction.sdpipe import throughput
from reproduction.sdpipe.testbed import ALL_REDUCE, BERT, BY_TEXT, RESNET, SDPIPE
from reproduction.sdpipe.time_to_loss import TRACE_STEPS, figures_5_and_7

_SETUP = """\
**The paper's set-up** (section 5.1): nodes of 8 A100 on 10 Gb Ethernet; ResNet-50 and BERT-base on
N pipelines of M stages; a worker sleeps with probability 10 %, under A for 0.1 s (BERT: 0.2 s),
under B for 0.3 s (0.6 s). P is 10, T is 1/N of an iteration. Figures are of 16 workers, Fig. 6 also
of 64. The text prints seven ratios; of Figs. 4 and 6 it says which method is faster.

**From the project**: the simulator with its policies, schedules, scenarios and convergence mode.
**Written for this page**: the testbed, and AD-PSGD as the authors built it (`matching.py`). Where
the text differs from the code that the authors published, this page follows the code, since the
figures came from it:

- Pipelines are not flushed: stage s has M - s mini-batches of 64 samples in flight, and the weights
  of each. Grids (M x N) are 4 x 4, 2 x 8, 1 x 16 and, with 64 workers, 4 x 16. A pipeline is within
  a node. Sleeps are drawn before each forward and each backward.
- SDPipe is the policy `adaptive` with windows of 10 ms, the longest that the code opens. In the
  code P counts ten updates of each worker: 5 N groups of two. `SDPipe by its text` has
  `window = "paper"` and P of ten groups.
- AD-PSGD is a random matching whose partners wait for each other; `AD-PSGD proper` is `pairwise`.
- HetPipe is `ssp` with a server on the first node, whose GPUs reach it inside; staleness M. It
  pushes every mini-batch and pulls every tenth, so 0.55 of the bytes travel each way. A worker
  waits for its push; in the code it does not.
- Compute: operations as counted in `describe/resnet_work.py` and `transformer_work.py`, at half of
  the data sheet's 19.5 TFLOPS in single precision: CUDA 10.2 has no TF32. Half is usual: Lambda
  Labs' 294 images per second of ResNet-50 on an RTX 2080 Ti are 54 %.
- Network: a node's GPUs share 10 Gb/s, 50 us per message; a group's ring passes a node once, and
  does not leave a node that has all its members (NVLink, 300 GB/s). Averages start when a backward
  has ended; in the code they start during it.
- Figs. 5 and 7: a network of three hidden layers of 32 learns labels of a wider one
  (`convergence.py`), with the times of ResNet-50 and BERT-base and gradients as stale as in the
  pipeline; SGD with momentum 0.9 for both. The target is the loss of All-Reduce after 80 steps;
  three seeds. `Decentralised` is the mean of All-Reduce and AD-PSGD. For Fig. 7 the appendix'
  recording of 16 shared GPUs is replayed, pipeline by pipeline.
- Group sizes: the appendix' Fig. 9, read off its box plot.

**Readings chosen with the figures known**, and what other readings would give:

- T and P are those of the published code. By the text, SDPipe takes {resnet_text:.2f} and
  {bert_text:.2f} times as long under B with ResNet-50 and BERT-base (printed 1.4, here {resnet:.2f}
  and {bert:.2f}); but groups become so large that it is at most {lead_text:.2f} times as fast as
  All-Reduce (printed 4.3, here {lead:.2f}).
- The length of Fig. 7's recording: {trace_steps} steps of All-Reduce on equal workers. The paper
  does not state it.
- What is trained instead of the two models, its learning rate, and the target loss.
- Fig. 9 is read off a drawing, not printed; its rows say so. Its sleeps (B) are not stated.
"""


def reproduce(log: Callable[[str], None]) -> Reproduction:
    times = throughput.sweep(log)
    training_rows, curves = figures_5_and_7(log)
    log("sizes of groups")
    size_rows, sizes = throughput.figure_9()
    return Reproduction(
        paper="sdpipe",
        title="SDPipe",
        source="Miao et al., PVLDB 16(9), 2023",
        setup=_setup(times),
        rows=(*throughput.figure_4(times), *throughput.figure_6(times), *training_rows, *size_rows),
        plots=(*throughput.throughput_plots(times), *curves, sizes),
    )


def _setup(times: throughput.Times) -> str:
    return _SETUP.format(
        resnet=throughput.slowdown(times, RESNET.name, SDPIPE),
        bert=throughput.slowdown(times, BERT.name, SDPIPE),
        resnet_text=throughput.slowdown(times, RESNET.name, BY_TEXT),
        bert_text=throughput.slowdown(times, BERT.name, BY_TEXT),
        lead=throughput.max_lead(times, SDPIPE, ALL_REDUCE),
        lead_text=throughput.max_lead(times, BY_TEXT, ALL_REDUCE),
        trace_steps=TRACE_STEPS,
    )

"""Ada-Grouper's Figs. 6 to 10: rows, plots and the set-up text.

Source: Wang et al., "Ada-Grouper: Accelerating Pipeline Parallelism in Preempted Network by
Adaptive Group-Scheduling for Micro-Batches", arXiv:2303.01675, 2023.
"""

from collections.abc import Callable

from reproduction.ada_grouper import granularity, scaling_figures, tuned_k
from reproduction.ada_grouper.granularity import GranularityResult
from reproduction.ada_grouper.scaling_figures import ScalingResult
from reproduction.ada_grouper.tuned_k import TuningHour
from reproduction.paper_row import PaperRow, Reproduction

_SETUP = """\
**The paper's set-up** (section 6.1, Tables 1 and 2): one GPU per worker, a pipeline over 2 to 8
workers of three platforms, whose networks other jobs use as well; GPT in float16, U-Net in float32.

| platform | device | network | other flows |
|---|---|---|---|
| C1x | V100-SXM2: 125 and 15.7 TFLOPS, 900 GB/s | 25 Gbit/s, 50 us | 1: the machine is shared |
| S1 | V100S: 130 and 16.4 TFLOPS, 1134 GB/s | 100 Gbit/s, 20 us | 1: the network is shared; \
3 when busy |
| M8s | V100-SXM2 | 100 Gbit/s, 20 us | 2: both are shared |

**From the project**: schedules, the planner's rule that splits a model into stages, the cost model
of pipelines (`cost/pipeline.py`) and the tuner that training uses. The simulator is not used.
**Written for this page**: links that other flows share (`testbed.py`), the U-Net, replicas.

- **Pipelines** are executed action by action. A message never blocks its sender, as in section 5.3.
- **Preemption**: on each direction of each link other flows come and go, with Poisson arrivals, 1 s
  on average, fair sharing and fixed seeds. A message takes as long as its share of the link allows.
  The paper gives no figures for its load. Each reason for preemption that it names brings one other
  flow on average; Rounds 3 and 5 of Fig. 6 and four of the five hours of Fig. 10 are busy, with
  three. A plot shows what other loads would give.
- **Compute**: 30 % of the peak in float16 (Megatron-LM's 39 TFLOPS on a V100, arXiv:1909.08053) and
  56 % in float32 (ResNet-50 on a V100, NVIDIA's DeepLearningExamples), whatever the size of a
  micro-batch. Adding its gradients to the sum costs two reads and a write of device memory. That
  small products compute less efficiently is left out: no publication says by how much.
- **Sequences** have 1024 tokens; the paper does not state it. Of 1024 and 2048, this is the length
  with which replicas send 2.6 to 4.6 times as much as a pipeline; section 6.2.3 says 2-5 times,
  which is therefore no row.
- **Micro-batches**: 6 // k samples of 192 in Figs. 6 and 10, 1 of 64 in Figs. 8 and 9, 8 for
  replicas, 16 for U-Nets (not stated). k goes up to 4 in Figs. 7 to 9, the largest named there.
- **U-Net**: that of latent diffusion (arXiv:2112.10752) with the widths of Table 2. It has 38 M and
  860 M parameters; the paper's, which is not described, has 32 M and 768 M. Skips go directly to
  the stage that needs them, through the same uplink as the stage's other output.
- **SPMD** is data parallel, as the paper found: a ring all-reduce of all gradients after each
  micro-batch, without overlap, which XLA did not do at the time. In each round the slowest link
  decides.
- **Tuning**: transfers are recorded in two steps of 1F1B per size, as by the tuner of the runtime,
  and `length` predicts each plan from them. Our own tuner decides as well.

**Readings chosen with the figures known**: the load (one flow for each reason, three when busy; how
long a flow lasts), of which the paper gives no figure; the length of sequences, by section 6.2.3;
and how the skips of the U-Net travel.

"""


def reproduce(log: Callable[[str], None]) -> Reproduction:
    log("Fig. 6: granularity, five rounds")
    fine = granularity.measure()
    log("Figs. 7 to 9: U-Net and GPT on 2 to 8 workers")
    scaled = scaling_figures.measure()
    log("Fig. 10: tuning")
    hours = tuned_k.measure()
    return Reproduction(
        paper="ada-grouper",
        title="Ada-Grouper: kFkB on preempted networks",
        source="Wang et al., Ada-Grouper: Accelerating Pipeline Parallelism in Preempted Network "
        "by Adaptive Group-Scheduling for Micro-Batches, arXiv:2303.01675, 2023",
        setup=_SETUP + _finding(fine, hours),
        rows=(
            *_abstract_rows(fine, scaled),
            *granularity.rows(fine),
            *scaling_figures.rows(scaled),
            *tuned_k.rows(hours),
        ),
        plots=(*granularity.plots(fine), *scaling_figures.plots(scaled), *tuned_k.plots(hours)),
    )


def _finding(fine: GranularityResult, hours: list[TuningHour]) -> str:
    chosen = [str(hour.decision.candidate) for hour in hours]
    return (
        "**What the paper does not separate**: in Fig. 6 k = 1 also has the largest micro-batches, "
        "so it fills and drains the pipeline most slowly. In a busy round 1F1B with micro-batches "
        f"of 1 has {fine.gain_by_size_alone:.2f} times the throughput of 1F1B with 6, and k = 6 "
        f"has {fine.gain(3, 6):.2f} times. Our tuner, which takes the least memory within 2 % of "
        f"the shortest step, chooses, hour by hour: {'; '.join(chosen)}.\n"
    )


def _abstract_rows(fine: GranularityResult, scaled: ScalingResult) -> list[PaperRow]:
    gains = [max(fine.gains), *scaled.best_gains]
    what = "kFkB over 1F1B, greatest of each figure and model: {} of these"
    return [
        PaperRow("abstract", what.format("the least"), 1.04, min(gains)),
        PaperRow("abstract", what.format("the greatest"), 1.30, max(gains)),
    ]

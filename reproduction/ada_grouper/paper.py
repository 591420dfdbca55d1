"""Ada-Grouper's Figs. 6 to 10, computed here."""

from collections.abc import Callable

from reproduction.ada_grouper import granularity, scaling, tuning
from reproduction.ada_grouper.granularity import Granularity
from reproduction.ada_grouper.scaling import Scaling
from reproduction.ada_grouper.tuning import Hour
from reproduction.claim import Reproduction, Row

_SETUP = """\
The paper's set-up (section 6.1, Tables 1 and 2): one GPU per worker, a pipeline over 2 to 8 workers
of three platforms whose networks other jobs use too; GPT in float16, U-Net in float32.

| platform | device | network | other flows |
|---|---|---|---|
| C1x | V100-SXM2: 125 and 15.7 TFLOPS, 900 GB/s | 25 Gbit/s, 50 us | 1: the machine is shared |
| S1 | V100S: 130 and 16.4 TFLOPS, 1134 GB/s | 100 Gbit/s, 20 us | 1: the network is shared; \
3 when busy |
| M8s | V100-SXM2 | 100 Gbit/s, 20 us | 2: both are |

**Of the project**: schedules, the planner's rule for cutting a model into stages, the cost model \
of pipelines (`cost/pipeline.py`) and the tuner that also trains. The simulator is not called. \
**Its own**: links that other flows share (`load.py`), the U-Net, replicas.

How it is modelled:

- **Pipelines** are executed action by action. A message never holds up its sender, as in section \
5.3.
- **Preemption.** On each direction of each link other flows come and go: Poisson arrivals, 1 s on \
average, fair sharing, fixed seeds. A message takes as long as the share that it meets. The paper \
gives no figures for its load. Each reason for preemption that it names brings one other flow, on \
average; Rounds 3 and 5 of Fig. 6 and four of the five hours of Fig. 10 are busy, with three. \
A plot shows what other loads would give.
- **Compute.** 30 % of the peak in float16 (Megatron-LM's 39 TFLOPS on a V100, arXiv:1909.08053) \
and 56 % in float32 (ResNet-50 on a V100, NVIDIA's DeepLearningExamples), whatever the size of a \
micro-batch. Adding its gradients to the sum costs two reads and a write of device memory. That \
small products compute less efficiently is left out: nobody printed by how much.
- **Sequences** have 1024 tokens. The paper does not say. Of 1024 and 2048, that makes replicas \
send 2.6 to 4.6 times what a pipeline does; section 6.2.3 says 2-5 times, which is no row therefore.
- **Micro-batches**: 6 // k samples of 192 in Figs. 6 and 10, 1 of 64 in Figs. 8 and 9, 8 for \
replicas. Of U-Nets 16 (not stated). k goes to 4 in Figs. 7 to 9, the largest that is named there.
- **U-Net** is that of latent diffusion (arXiv:2112.10752) with the widths of Table 2; it has 38 M \
and 860 M parameters, the paper's 32 M and 768 M: theirs is not described. Skips go straight to \
the stage that takes them, through the same uplink as the stage's other output.
- **SPMD** is data parallel, as the paper found: a ring all-reduce of all gradients behind each \
micro-batch, without overlap, which XLA did not do then. In each round the slowest link decides.
- **Tuning**: transfers recorded in two steps of 1F1B per size, as the runtime's tuner does, and \
`length` of each plan from these. Our own tuner decides beside it.

**Readings chosen with the figures known**: the load (one flow for each reason, three when busy; \
how long a flow lasts), of which the paper gives no figure; the length of sequences, by section \
6.2.3; and how the skips of the U-Net travel.

"""


def _finding(fine: Granularity, hours: list[Hour]) -> str:
    chosen = [str(hour.decision.candidate) for hour in hours]
    return (
        "What the paper does not separate: in Fig. 6 k = 1 also has the largest micro-batches, so "
        "that it fills and drains the pipeline slowest. In a busy round 1F1B with micro-batches of "
        f"1 has {fine.by_size_alone:.2f} times the throughput of 1F1B with 6, and k = 6 has "
        f"{fine.gain(3, 6):.2f} times. Our tuner, which wants the least memory within 2 % of the "
        f"shortest step, chooses, hour by hour: {'; '.join(chosen)}.\n"
    )


def reproduce(say: Callable[[str], None]) -> Reproduction:
    say("Fig. 6: granularity, five rounds")
    fine = granularity.measure()
    say("Figs. 7 to 9: U-Net and GPT on 2 to 8 workers")
    scaled = scaling.measure()
    say("Fig. 10: tuning")
    hours = tuning.measure()
    return Reproduction(
        paper="ada-grouper",
        title="Ada-Grouper: kFkB on preempted networks",
        source="Wang et al., Ada-Grouper: Accelerating Pipeline Parallelism in Preempted Network "
        "by Adaptive Group-Scheduling for Micro-Batches, arXiv:2303.01675, 2023",
        setup=_SETUP + _finding(fine, hours),
        rows=(
            *_abstract(fine, scaled),
            *granularity.rows(fine),
            *scaling.unet_rows(scaled),
            *scaling.gpt_rows(scaled),
            *tuning.rows(hours),
        ),
        plots=(*granularity.plots(fine), *scaling.plots(scaled), *tuning.plots(hours)),
    )


def _abstract(fine: Granularity, scaled: Scaling) -> list[Row]:
    gains = [max(fine.gains), *scaled.best_gains]
    return [
        Row(
            place="abstract",
            what=f"kFkB over 1F1B, greatest of each figure and model: {which} of these",
            printed=printed,
            ours=gain,
        )
        for printed, which, gain in (
            (1.04, "the least", min(gains)),
            (1.30, "the greatest", max(gains)),
        )
    ]

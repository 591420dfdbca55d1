"""Figures 16 to 23 of Prague: what the paper prints, and what comes out here."""

from collections.abc import Callable, Mapping

from polyrhythm.types import Seconds
from reproduction.claim import Reproduction
from reproduction.prague import figures
from reproduction.prague.models import RESNET_18, RESNET_200, VGG_16
from reproduction.prague.pace import pace
from reproduction.prague.stated import OVERALL
from reproduction.prague.table_claims import image_rows, iteration_rows
from reproduction.prague.testbed import ALL_REDUCE, GRPC, SIXTEEN, SMART, job
from reproduction.prague.throughput import images_per_second, iterations
from reproduction.prague.training import (
    HOMOGENEOUS,
    SLOW_WORKER,
    TWICE,
    sections,
    straying,
    trained,
)
from reproduction.prague.vgg_claims import vgg_rows

_SETUP = """\
16 workers on 4 nodes of 4 GTX 1080 Ti with FDR InfiniBand (Fig. 14); 32 on 8 for ResNet-50. VGG-16
learns CIFAR-10 with batches of 128, ResNet-18, -50 and -200 ImageNet with 256, 96 and 32 (Fig. 15).

**Of the project**: every method is the policy of that name that also trains, in the simulator:
All-Reduce, Prague with static, random (groups of 3) and smart groups, AD-PSGD as `pairwise`, the
parameter server as `ssp` with staleness 0; losses are of its convergence mode. **Its own** are the
testbed and the times of the models.

- **Compute**: published times of the ResNets on a Pascal Titan X, the same chip as a 1080 Ti (16
  images forward and backward: 31.54, 103.58 and 296.51 ms, jcjohnson/cnn-benchmarks), whatever the
  batch. VGG-16 for CIFAR-10 (13 convolutions, one product behind them; 14.7 million weights) is
  counted, and runs at ResNet-18's 5.5 TFLOPS: {compute:.1f} ms a step. Reading images, optimizers
  and the making of NCCL communicators are left out.
- **Network**: NCCL's rings at 80 % of the data sheets, 5.5 GB/s for a node's InfiniBand and 12.6
  GB/s for PCIe inside it; 20 us a message. A ring passes a node's connection once, and shares it
  with other groups' rings. Averages begin after the backward.
- **gRPC**: 0.8 GB/s for each process (tensorflow issue 6116, 2017) under the parameter server and
  AD-PSGD, which are TensorFlow's remote variables (section 7.1.3); AD-PSGD reads, then writes. One
  of two workers is active, as section 2.3 says. Were all, as Figure 3 can be read, each would be in
  two exchanges a step, and AD-PSGD slower.
- **Servers**: the paper does not say how many. TensorFlow's published benchmarks had "equal numbers
  of parameter servers and worker servers"; so has this, with equal parts: {sixteen:.0f} ms a step.
  With 8 it would be {eight:.0f} ms, with one for each node {four:.0f} ms. The printed 4.27 of
  All-Reduce asks for {asked:.0f} ms.
- **Slow**: worker {slow} (drawn) sleeps 2 or 5 times what a step computes, before every step: "2 or
  5 times the normal iteration time of sleep every iteration on one randomly selected slow worker".
  It could be read as another worker in each step. If each worker slept 2x in a 16th of its steps,
  VGG-16 would keep {stray_all:.2f} of its speed with All-Reduce (printed: 0.39) and {stray:.2f}
  with smart groups (printed: 0.80).
- **Loss**: time is VGG-16's; what is trained is a network of 16-32-8 in NumPy, from one data set,
  with the paper's learning rate and momentum, to what the parameter server reaches in 120 steps. A
  worker's speed is that of a run's second half; time to the loss is steps times time of a step.
- **Images/s** are taken as those of one GPU: of all 16, they were a twentieth of its speed.

**Readings chosen with the figures known**: how many servers there are, that one half of AD-PSGD's
workers is active, and who sleeps were chosen by the paper's words, but with rough estimates of both
readings at hand. Two things were mended after a first look: rings had not shared a node's
connection, and the unsettled start of smart groups had counted; so a speed is that of the second
half of a run.

Figs. 16 and 17 have no numbers in the text: plots only. The text says that all-reduce is
"significantly faster" on one node, or with one worker per node, than with several on several; here
it is faster on one node, but a ring costs the same however many of a node are in it. It says that
steps to a loss grow with the section length, which they do. C_thres, the sizes of smart groups and
the models' details are not printed. The Transformer of section 7.3 (4x a step) is left out: neither
its size nor its vocabulary is stated.
"""


def reproduce(say: Callable[[str], None]) -> Reproduction:
    """VGG-16's runs, then the tables."""
    vgg = trained(say)
    say("VGG-16, section lengths")
    lengths = sections()
    tables = {}
    for model in (RESNET_18, RESNET_200):
        say(f"{model.name}, homogeneous and one worker sleeps 5 times")
        tables[model.name] = images_per_second(model)
    say("ResNet-50, 32 workers")
    counted = iterations()
    return Reproduction(
        paper="prague",
        title="Prague: partial all-reduce for heterogeneous clusters",
        source='Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous '
        'Decentralized Training", ASPLOS 2020',
        setup=_setup({method: found.step for method, found in vgg[HOMOGENEOUS].items()}),
        rows=(
            *vgg_rows(vgg),
            *(row for name, found in tables.items() for row in image_rows(name, found)),
            *iteration_rows(counted),
        ),
        plots=(
            figures.cost_plot(),
            figures.section_plot(lengths),
            *figures.vgg_plots(vgg),
            *(figures.image_plot(name, found) for name, found in tables.items()),
            figures.iteration_plot(counted),
        ),
    )


def _setup(steps: Mapping[str, Seconds]) -> str:
    strayed = {
        method: steps[method] / pace(job(method, VGG_16, scenario=straying(TWICE)))
        for method in (ALL_REDUCE, SMART)
    }
    return _SETUP.format(
        compute=1e3 * VGG_16.compute,
        sixteen=1e3 * _served(SIXTEEN.number),
        eight=1e3 * _served(8),
        four=1e3 * _served(4),
        asked=1e3 * OVERALL[HOMOGENEOUS][ALL_REDUCE] * steps[ALL_REDUCE],
        stray_all=strayed[ALL_REDUCE],
        stray=strayed[SMART],
        slow=SLOW_WORKER,
    )


def _served(num_servers: int) -> Seconds:
    """A step with so many servers: all push, then all pull."""
    return VGG_16.compute + 2 * SIXTEEN.number * VGG_16.size / (num_servers * GRPC)

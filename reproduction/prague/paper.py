"""Prague's evaluation: partial all-reduce against all-reduce, parameter servers and AD-PSGD.

Source: Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous Decentralized
Training", ASPLOS 2020.
"""

from collections.abc import Callable, Mapping

from polyrhythm.types import Seconds
from reproduction.paper_row import Reproduction
from reproduction.prague import figures, runs, testbed
from reproduction.prague.runs import HOMOGENEOUS, SLOW_WORKER, TWICE, any_sleeps, step_time
from reproduction.prague.testbed import ALL_REDUCE, GRPC, SIXTEEN, SMART, VGG_16, job

_SETUP = """\
**The paper's set-up**: 16 workers on 4 nodes of 4 GTX 1080 Ti with FDR InfiniBand (Fig. 14); 32 on
8 nodes for ResNet-50. VGG-16 learns CIFAR-10 with batches of 128; ResNet-18, -50 and -200 learn
ImageNet with 256, 96 and 32 (Fig. 15).

**From the project**: the simulator, in which every method is the policy that training uses:
All-Reduce, Prague with static, random (groups of 3) and smart groups, AD-PSGD as `pairwise`, the
parameter server as `ssp` with staleness 0; losses come from its convergence mode. **Written for
this page**: the testbed and the times of the models.

- **Compute**: published times of the ResNets on a Pascal Titan X, the same chip as a 1080 Ti (16
  images forward and backward: 31.54, 103.58 and 296.51 ms, jcjohnson/cnn-benchmarks), whatever the
  batch. The operations of VGG-16 for CIFAR-10 (13 convolutions and one product; 14.7 million
  weights) are counted, at ResNet-18's 5.5 TFLOPS: {compute:.1f} ms per step. Reading images,
  optimizers and the creation of NCCL communicators are left out.
- **Network**: NCCL's rings at 80 % of the data sheets, 5.5 GB/s for a node's InfiniBand and 12.6
  GB/s for PCIe inside it; 20 us per message. A ring passes a node's connection once, and shares it
  with the rings of other groups. Averages start after the backward.
- **gRPC**: 0.8 GB/s for each process (tensorflow issue 6116, 2017) with the parameter server and
  AD-PSGD, which use TensorFlow's remote variables (section 7.1.3); AD-PSGD reads, then writes. One
  of two workers is active, as section 2.3 says. If all were active, as Figure 3 can be read, each
  worker would be in two exchanges per step, and AD-PSGD slower.
- **Servers**: the paper does not state their number. TensorFlow's published benchmarks had "equal
  numbers of parameter servers and worker servers", and so has this, with equal parts:
  {sixteen:.0f} ms per step. With 8 it would be {eight:.0f} ms, with one per node {four:.0f} ms. The
  printed 4.27 of All-Reduce implies {implied:.0f} ms.
- **Slow worker**: worker {slow} (picked at random) sleeps 2 or 5 times the compute time of a step,
  before every step: "2 or 5 times the normal iteration time of sleep every iteration on one
  randomly selected slow worker". This could also mean another worker in each step. If each worker
  slept 2x in a 16th of its steps, VGG-16 would keep {any_all_reduce:.2f} of its speed with
  All-Reduce (printed: 0.39) and {any_smart:.2f} with smart groups (printed: 0.80).
- **Loss**: times are VGG-16's; a network of 16-32-8 in NumPy is trained, on one data set, with the
  paper's learning rate and momentum, to the loss of the parameter server after 120 steps. A
  worker's speed is that of the second half of a run; time to the loss is steps times step time.
- **Images/s** are read as those of one GPU: if they were of all 16, a GPU would run at a twentieth
  of its speed.

**Readings chosen with the figures known**: the number of servers, the half of AD-PSGD's workers
that is active, and which worker sleeps follow the paper's words, but rough estimates of both
readings were known. Two things were fixed after a first look at the results: rings did not share a
node's connection, and the start of smart groups was counted; speeds are therefore those of the
second half of a run.

Figs. 16 and 17 have no numbers in the text: plots only. The text says that all-reduce is
"significantly faster" on one node, or with one worker per node, than with several on several; here
it is faster on one node, but a ring costs the same however many workers of a node it has. The text
says that steps to a loss grow with the section length, which they do. C_thres, the sizes of smart
groups and details of the models are not printed. The Transformer of section 7.3 (4x a step) is left
out: neither its size nor its vocabulary is stated.
"""


def reproduce(log: Callable[[str], None]) -> Reproduction:
    vgg = runs.train_vgg(log)
    log("VGG-16, section lengths")
    sections = runs.section_steps()
    images = {}
    for model in (testbed.RESNET_18, testbed.RESNET_200):
        log(f"{model.name}, homogeneous and one worker sleeps 5 times")
        images[model.name] = runs.images_per_second(model)
    log("ResNet-50, 32 workers")
    steps = runs.steps_in_ten_hours()
    return Reproduction(
        paper="prague",
        title="Prague: partial all-reduce for heterogeneous clusters",
        source='Luo et al., "Prague: High-Performance Heterogeneity-Aware Asynchronous '
        'Decentralized Training", ASPLOS 2020',
        setup=_setup({method: found.step for method, found in vgg[HOMOGENEOUS].items()}),
        rows=(
            *figures.vgg_rows(vgg),
            *(row for name, found in images.items() for row in figures.image_rows(name, found)),
            *figures.step_rows(steps),
        ),
        plots=(
            figures.cost_plot(),
            figures.section_plot(sections),
            *figures.vgg_plots(vgg),
            *(figures.image_plot(name, found) for name, found in images.items()),
            figures.step_plot(steps),
        ),
    )


def _setup(steps: Mapping[str, Seconds]) -> str:
    kept = {
        method: steps[method] / step_time(job(method, VGG_16, scenario=any_sleeps(TWICE)))
        for method in (ALL_REDUCE, SMART)
    }
    return _SETUP.format(
        compute=1e3 * VGG_16.compute,
        sixteen=1e3 * _server_step(SIXTEEN.number),
        eight=1e3 * _server_step(8),
        four=1e3 * _server_step(4),
        implied=1e3 * figures.OVERALL[HOMOGENEOUS][ALL_REDUCE] * steps[ALL_REDUCE],
        any_all_reduce=kept[ALL_REDUCE],
        any_smart=kept[SMART],
        slow=SLOW_WORKER,
    )


def _server_step(num_servers: int) -> Seconds:
    """A step with that number of servers: all workers push, then all pull."""
    return VGG_16.compute + 2 * SIXTEEN.number * VGG_16.size / (num_servers * GRPC)

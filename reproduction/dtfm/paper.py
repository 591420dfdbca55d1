"""Figures 4, 5 and 6 of DT-FM: what the paper prints, and what comes out here."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from reproduction.claim import Plot, Reproduction
from reproduction.dtfm.claims import curve_rows, step_rows
from reproduction.dtfm.curves import OURS, PRINTED, Curve, curves
from reproduction.dtfm.networks import Network, networks
from reproduction.dtfm.steps import CaseSteps, Steps, case_steps, ratios
from reproduction.dtfm.workload import Workload, petaflops

_SETUP = """\
64 V100s train GPT3-XL (2048 wide, sequences of 2048; 24, 32 or 40 layers) with batches of 1024,
2048 and 4096 on five networks, by DT-FM with its scheduler, with three random layouts, and by
Megatron on random layouts with the best of all (tensor, pipeline, data) degrees.

**Of the project**: the planner (`plan/dtfm`: cost, placement, genetic search), the schedules, and
the cost models of pipelines and of sharded servers. The simulator is not called. **Its own**: a
runtime whose stages wait for their messages (`blocking.py`), Megatron, random search and the
published baseline.

- **Compute**: 62.5 TFLOPS for every GPU, "50%" of "125 TeraFLOPS" (section 1); Megatron's authors
  measured 62.4 on a V100 with a model of this size. Layers are computed again before their
  backward, in both systems; PFLOPS here do not count that. No logits: the published runtime trains
  a classifier. Its optimizer's time is left out.
- **Bytes**: activations and gradients in fp16, as the published runtime. The first stage holds the
  embedding, too (1.3 billion parameters in all).
- **Networks**: layouts are planned on the published planner's tables; steps run on those of section
  4's text, where it differs (25 and 10 Gbit/s of a machine in cases 1 and 2, which its GPUs share
  when they send at once; 10 Gbit/s inside of case 3's organisations). Case 2 has 8 machines of 4
  GPUs, as the published tables; the text's 4 would not make 64.
- **DT-FM**: 8 stages x 8 pipelines, GPipe over 64 sequences at a time, then its sharded servers by
  eq. 2. The layout is the best by its cost, the random ones are the published script's (seeds 2022,
  2023, 2024).
- **Megatron**: 1F1B over single sequences, an all-reduce per layer and direction for tensor
  parallelism, all-reduce as a ring in order of ranks, on "the same random layouts" (appendix B.2).
  The paper does not say its micro-batch.
- **Figure 5**: 300 evaluations, seeds 0, 1, 2, mean. Kernighan-Lin is there twice: with the weight
  of the cost itself, and with that of the published baseline, which is a pair's activations less
  its gradients, and negative.

**Readings chosen with the figures known**, and what others would give:

- Stages wait for their messages. Section 3.5 says that messages hide behind compute; that was
  modelled first, and misses. The published runtime cannot do it: receives and sends of a stage are
  on streams of their own but on one NCCL communicator, which runs them one after another
  (`dist_gpipe_pipeline_async.py`, NVIDIA/nccl issue 574). The table has both.
- The embedding had been left out at first, and GPUs of a machine had shared its network whether or
  not all of them sent.
- Case 2's layout is the best by the paper's cost ({best_spot:.1f} s), which is also the one that
  the authors published; the paper's search, as it is described, ends at {spot_end:.1f} s here.
- Kernighan-Lin's rows are of the published weights, since these were drawn. With the weight of the
  cost itself it is as good as the paper's search in {alike} of the five cases; in case 5 it ends at
  {printed_end:.1f} s, the paper's at {our_end:.1f} s.
- Megatron's ranks: random, as stated. If the launcher had numbered the GPUs of a machine in a row,
  its best degrees in case 1 would be {launched_degrees} instead of {degrees} (printed: (2, 4, 8)).
  Cases 3 to 5 have one GPU per machine and do not change; the last column has the others.

| at least to at most | printed | rows | messages hidden | ranks in a row |
|---|---|---|---|---|
{both}
"""


def reproduce(say: Callable[[str], None]) -> Reproduction:
    """Both parts, case by case."""
    cases = networks()
    steps, searched = [], []
    for number, network in enumerate(cases, start=1):
        say(f"case {number}, {network.title}: steps of DT-FM and of Megatron")
        steps.append(case_steps(network))
        say(f"case {number}, {network.title}: searches")
        searched.append(curves(network.name))
    return Reproduction(
        paper="dt-fm",
        title="DT-FM: decentralised training on heterogeneous networks",
        source='Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous '
        'Environments", NeurIPS 2022, arXiv:2206.01288v2',
        setup=_setup(steps, searched),
        rows=(
            *step_rows(steps),
            *curve_rows(searched, [case.planned_cost for case in steps]),
        ),
        plots=(*_step_plots(cases, steps), *_curve_plots(cases, searched)),
    )


def _setup(steps: Sequence[CaseSteps], searched: Sequence[Mapping[str, Curve]]) -> str:
    first, spot, *_, last = steps
    others = steps[:-1]
    both = (
        (
            "DT-FM over Megatron, case 5",
            "3.8 to 4.8",
            ratios(last.megatron, last.scheduled).values(),
            ratios(last.megatron, last.overlapped).values(),
            ratios(last.launched, last.scheduled).values(),
        ),
        (
            "the same, cases 1 to 4",
            "1.2 to 2.5",
            [x for case in others for x in ratios(case.megatron, case.scheduled).values()],
            [x for case in others for x in ratios(case.megatron, case.overlapped).values()],
            [x for case in others for x in ratios(case.launched, case.scheduled).values()],
        ),
        (
            "case 1's Megatron over case 5's DT-FM",
            "1.7 to 3.5",
            ratios(last.scheduled, first.megatron).values(),
            ratios(last.overlapped, first.megatron).values(),
            ratios(last.scheduled, first.launched).values(),
        ),
        (
            "DT-FM over its random layouts, case 5",
            "up to 2.7",
            ratios(last.at_random, last.scheduled).values(),
            ratios(last.random_overlapped, last.overlapped).values(),
            ratios(last.at_random, last.scheduled).values(),
        ),
    )
    lines = [
        f"| {what} | {printed} | {' | '.join(map(_range, ours))} |" for what, printed, *ours in both
    ]
    ends = [{way: curve[-1] for way, curve in found.items()} for found in searched]
    return _SETUP.format(
        both="\n".join(lines),
        best_spot=spot.planned_cost,
        spot_end=ends[1][OURS],
        alike=sum(end[PRINTED] <= end[OURS] for end in ends),
        printed_end=ends[-1][PRINTED],
        our_end=ends[-1][OURS],
        degrees=first.best_degrees,
        launched_degrees=first.best_launched,
    )


def _range(values: Iterable[float]) -> str:
    found = list(values)
    return f"{min(found):.2f} to {max(found):.2f}"


def _step_plots(cases: Sequence[Network], steps: Sequence[CaseSteps]) -> Iterator[Plot]:
    for number, (network, case) in enumerate(zip(cases, steps, strict=True), start=1):
        systems: dict[str, Steps] = {
            "DT-FM": case.scheduled,
            "DT-FM, random layouts": case.at_random,
            "Megatron": case.megatron,
        }
        yield Plot(
            name=f"fig4_case{number}",
            title=f"Fig. 4: case {number}, {network.title}",
            x="layers x batch",
            y="PFLOPS",
            series={
                system: [(_label(of), petaflops(of, step)) for of, step in taken.items()]
                for system, taken in systems.items()
            },
            printed={},
        )
        yield Plot(
            name=f"fig6_case{number}",
            title=f"Fig. 6: case {number}, {network.title}",
            x="layers x batch",
            y="seconds per iteration",
            series={
                system: [(_label(of), step) for of, step in taken.items()]
                for system, taken in systems.items()
            },
            printed={},
        )


def _curve_plots(
    cases: Sequence[Network], searched: Sequence[Mapping[str, Curve]]
) -> Iterator[Plot]:
    for number, (network, found) in enumerate(zip(cases, searched, strict=True), start=1):
        yield Plot(
            name=f"fig5_case{number}",
            title=f"Fig. 5: case {number}, {network.title}",
            x="evaluations",
            y="estimated cost, seconds",
            series={way: list(enumerate(curve, start=1)) for way, curve in found.items()},
            printed={},
        )


def _label(workload: Workload) -> str:
    return f"{workload.num_layers} x {workload.batch}"

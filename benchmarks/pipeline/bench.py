"""Pipelines on slow, uneven and changing networks: schedule `auto` against 1F1B, ours and torch's.

Four stages on four hosts of the lab, real gloo processes, emulated compute. Sides take turns, a
step each; ratios are taken between the steps of one round. A step during which the machine's host
gave cores to others is repeated. `auto` starts at 1F1B, knows nothing of the network, and has a few
steps to adapt before rounds count. The ideal is the simulated length of the best schedule on the
described network.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from benchmarks.harness.report import (
    Bar,
    Result,
    median_of,
    names_of,
    print_bars,
    print_rows,
    ratio_over_rounds,
    select,
)
from benchmarks.harness.timing import undisturbed
from benchmarks.pipeline import networks
from benchmarks.pipeline.networks import FAST, FULL, HOSTS, PipelineNetwork, ideal
from benchmarks.pipeline.worker import BASELINE, StageLoad, StagePool, plain_loop
from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.cost.pipeline import length
from polyrhythm.lab.lab import Lab
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.tables import print_line
from polyrhythm.types import Seconds

OWN, AUTO, KFKB = "1f1b", "auto", "kfkb:2"
_PHASES = (FAST, FULL, FAST)  # of a network that `auto` must follow
_ALLOWED = 1.02  # times the ideal: the tuner trades as much for memory

BARS = (
    Bar("half_vs_own", ">=", 1.14, "1F1B's step over auto's, transfers of half a forward"),
    Bar("half_vs_torch", ">=", 1.30, "the same against torch's 1F1B"),
    Bar("half_vs_ideal", ">=", 0.95, "the simulated best over auto's step"),
    Bar("full_vs_own", ">=", 1.25, "transfers of a forward"),
    Bar("full_vs_torch", ">=", 1.55),
    Bar("full_vs_ideal", ">=", 0.95),
    Bar("bursty_vs_own", ">=", 1.20, "links that are preempted at random"),
    Bar("bursty_vs_torch", ">=", 1.40),
    Bar("slowlink_vs_own", ">=", 1.15, "one slow link of three"),
    Bar("slowlink_memory", ">", 1.0, "activations that kFkB holds over those of auto"),
    Bar("fast_vs_own", ">=", 0.99, "transfers of a fiftieth of a forward"),
    Bar("fast_vs_torch", ">=", 1.00),
    Bar("fast_vs_ideal", ">=", 0.97),
    Bar("plain_loop", ">=", 0.97, "a plain loop over the pipeline, one process"),
    Bar("follows", ">=", 1.0, "auto follows a network that turns slow and fast again"),
)


@dataclass(frozen=True, slots=True)
class PipelineExperiment:
    network: PipelineNetwork
    sides: tuple[str, ...]
    num_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSetting:
    experiments: tuple[PipelineExperiment, ...]
    adapting: int  # steps of auto that do not count
    load: StageLoad
    forward: Seconds
    follow_forward: Seconds
    follow_steps: int
    loop_rounds: int
    max_tries: int = 1  # of a step that the host disturbs


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    """One step of one side."""

    network: str
    round: int
    side: str
    seconds: Seconds
    schedule: str
    in_flight: tuple[int, ...]  # measured peak per stage


def _experiments(num_rounds: int) -> tuple[PipelineExperiment, ...]:
    """The last network differs least from the ideal, and gets more rounds."""
    sides = BASELINE, OWN, AUTO
    return (
        PipelineExperiment(networks.HALF, sides, num_rounds),
        PipelineExperiment(FULL, sides, num_rounds),
        PipelineExperiment(networks.BURSTY, sides, num_rounds),
        PipelineExperiment(networks.SLOW_LINK, (OWN, AUTO, KFKB), num_rounds),
        PipelineExperiment(FAST, sides, 2 * num_rounds - 1),
    )


FULL_SETTING = PipelineSetting(
    experiments=_experiments(num_rounds=3),
    adapting=3,
    load=StageLoad(num_microbatches=12, num_floats=8192),
    forward=0.080,
    follow_forward=0.030,
    follow_steps=20,
    loop_rounds=36,
    max_tries=4,
)
QUICK_SETTING = PipelineSetting(
    experiments=_experiments(num_rounds=1),
    adapting=1,
    load=StageLoad(num_microbatches=4, num_floats=8192),
    forward=0.012,
    follow_forward=0.012,
    follow_steps=2,
    loop_rounds=1,
)


def run(*, quick: bool, console: Console) -> Result:
    setting = QUICK_SETTING if quick else FULL_SETTING
    rows: list[PipelineRow] = []
    with Lab(networks.cluster()) as lab, StagePool(lab, setting.load) as pool:
        pool.set_network(FAST, setting.forward)
        for side in (BASELINE, OWN, KFKB):  # makes connections and buffers; torch exchanges shapes
            pool.step(side, 0.002, FAST, seed=0)
        for experiment in setting.experiments:
            measured = _measure(pool, experiment, setting)
            rows += measured
            _print_steps(console, experiment, measured)
        phases = _follow(pool, setting)
    ratios = {
        **_ratios(rows, setting),
        "plain_loop": plain_loop(setting.loop_rounds),
        "follows": float(all(followed for followed, _ in phases)),
    }
    print_bars(console, BARS, ratios, quick=quick)
    for _, phase in phases:
        print_line(console, phase)
    return Result(bench="pipeline", ratios=ratios, figures=_figures(rows, setting), rows=rows)


def _measure(
    pool: StagePool, experiment: PipelineExperiment, setting: PipelineSetting
) -> list[PipelineRow]:
    network, forward = experiment.network, setting.forward
    pool.set_network(network, forward)
    for number in range(setting.adapting):
        pool.step(AUTO, forward, network, seed=1000 + number, restart=number == 0)
    rows = []
    for number in range(experiment.num_rounds):
        for side in experiment.sides:
            step = partial(pool.step, side, forward, network, seed=number)
            answers = undisturbed(step, max_tries=setting.max_tries)
            rows.append(
                PipelineRow(
                    network=network.name,
                    round=number,
                    side=side,
                    seconds=answers[0].seconds,
                    schedule=answers[0].schedule,
                    in_flight=tuple(answer.peak_in_flight for answer in answers),
                )
            )
    return rows


def _ratios(rows: Sequence[PipelineRow], setting: PipelineSetting) -> dict[str, float]:
    ratios, names = {}, names_of(BARS)
    for experiment in setting.experiments:
        name = experiment.network.name
        of_network = select(rows, network=name)
        ratios[f"{name}_vs_own"] = ratio_over_rounds(of_network, "seconds", OWN, AUTO)
        if BASELINE in experiment.sides:
            ratio = ratio_over_rounds(of_network, "seconds", BASELINE, AUTO)
            ratios[f"{name}_vs_torch"] = ratio
        if f"{name}_vs_ideal" in names:
            step = median_of(of_network, "seconds", side=AUTO)
            ratios[f"{name}_vs_ideal"] = _ideal(experiment, setting) / step
        if KFKB in experiment.sides:
            held, held_by_auto = (_in_flight(of_network, side) for side in (KFKB, AUTO))
            ratios["slowlink_memory"] = held / held_by_auto
    return ratios


def _in_flight(rows: Sequence[PipelineRow], side: str) -> int:
    """Return the peak of activations that all stages hold."""
    return max(sum(row.in_flight) for row in select(rows, side=side))


def _ideal(experiment: PipelineExperiment, setting: PipelineSetting) -> Seconds:
    return ideal(experiment.network, setting.forward, setting.load.num_microbatches)


def _figures(rows: Sequence[PipelineRow], setting: PipelineSetting) -> dict[str, float]:
    figures: dict[str, float] = {}
    for experiment in setting.experiments:
        name = experiment.network.name
        for side in experiment.sides:
            step = median_of(rows, "seconds", network=name, side=side)
            figures[f"{name}_{side}_forwards"] = step / setting.forward
        if not experiment.network.bursty:
            figures[f"{name}_ideal_forwards"] = _ideal(experiment, setting) / setting.forward
        figures[f"{name}_in_flight"] = _in_flight(select(rows, network=name), AUTO)
    return figures


def _follow(pool: StagePool, setting: PipelineSetting) -> list[tuple[bool, str]]:
    """Run `auto` on a network that is fast, slow and fast again; see `_judge`."""
    phases, forward = [], setting.follow_forward

    def schedules(network: PipelineNetwork) -> list[str]:
        steps = range(setting.follow_steps)
        return [pool.step(AUTO, forward, network, seed=step)[0].schedule for step in steps]

    pool.set_network(FAST, forward)
    pool.step(AUTO, forward, FAST, seed=0, restart=True)
    for network in _PHASES:
        pool.set_network(network, forward)
        used = undisturbed(partial(schedules, network), max_tries=setting.max_tries)
        phases.append(_judge(network, used, forward, setting.load.num_microbatches))
    return phases


def _judge(
    network: PipelineNetwork, used: Sequence[str], forward: Seconds, num_microbatches: int
) -> tuple[bool, str]:
    """Judge the schedule in use after a phase's last step, simulated on the described network.

    Return whether `auto` has followed, and a line about it. It has if the schedule is within two
    per cent of the ideal and, where 1F1B is too, needs no more memory than 1F1B.
    """
    longest = _ALLOWED * ideal(network, forward, num_microbatches)

    def is_short(spec: ScheduleSpec) -> bool:
        schedule = spec.build(num_stages=len(HOSTS), num_microbatches=num_microbatches)
        return length(schedule, network.times(forward)) <= longest

    last, first = ScheduleSpec.parse(used[-1]), ScheduleSpec("1f1b")
    is_small = not is_short(first) or _held(last) <= _held(first)
    num_steps = max((i + 1 for i, schedule in enumerate(used) if schedule != used[-1]), default=0)
    followed = is_short(last) and is_small
    word = "followed" if followed else "NOT followed"
    return followed, f"phase {network.name}: {word}, {used[-1]} after {num_steps} steps"


def _held(spec: ScheduleSpec) -> int:
    schedule = spec.build(num_stages=len(HOSTS), num_microbatches=100)
    return sum(peak_in_flight(actions) for actions in schedule)


def _print_steps(
    console: Console, experiment: PipelineExperiment, rows: Sequence[PipelineRow]
) -> None:
    print_rows(
        console,
        [select(rows, side=side) for side in experiment.sides],
        {
            "side": lambda steps: steps[0].side,
            "steps, s": lambda steps: "  ".join(f"{row.seconds:.2f}" for row in steps),
            "schedule": lambda steps: steps[-1].schedule,
            "held per stage": lambda steps: ",".join(map(str, steps[-1].in_flight)),
        },
        title=f"network {experiment.network.name}",
        numbers=False,
    )

"""Ways to run a job, side by side: what each takes, waits for, sends and costs."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

from rich.console import Console

from polyrhythm.describe.scenario import Kill
from polyrhythm.describe.units import show, unit_of
from polyrhythm.simulate.convergence import ConvergenceCurve
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import Bytes, Seconds

_HOUR: Seconds = 3600.0
_GIGABYTE = 1e9
_BUSIEST = 5  # links that are listed with what they carry
# Large to small; people compare the figures of a column.
_UNITS = {"time": ("s", "ms", "us"), "size": ("GiB", "MiB", "KiB", "B")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One of them: a policy, a schedule, what if."""

    name: str
    job: SimulatedJob
    result: SimulationResult

    @property
    def num_steps(self) -> float:
        """Global ones, that were made."""
        return sum(map(len, self.result.ends)) / len(self.result.ends)

    @property
    def price(self) -> float | None:
        """Of a step; None where a device has no price. Who is gone costs nothing."""
        cluster, num_steps = self.job.cluster, self.num_steps
        used = {run.device for pipeline in self.job.pipelines for run in pipeline.runs}
        hours = 0.0
        for device in sorted(used):
            price = cluster.devices[device].price_per_hour
            if price is None or not num_steps:
                return None
            hours += price * self.result.present[device] / _HOUR
        egress = 0.0
        for place, price in enumerate(cluster.egress_price_per_gb):
            sent = self.result.bytes_sent[place].sum() - self.result.bytes_sent[place, place]
            egress += price * float(sent) / _GIGABYTE
        return (hours + egress) / num_steps


def show_variants(variants: Sequence[Variant], console: Console) -> None:
    """The first is what the others are compared with."""
    header = [
        *("", "step", "samples/s", "of first", "busy", "bubble", "wait"),
        *("group", "apart", "sent/step", "price/step"),
    ]
    times = _in_one_unit([variant.result.step_time for variant in variants], Seconds)
    sent = _in_one_unit(
        [_each_step(variant, variant.result.bytes_sent.sum()) for variant in variants], Bytes
    )
    rows = [
        _row(variant, variants[0], *cells)
        for variant, *cells in zip(variants, times, sent, strict=True)
    ]
    print_table(console, header, rows, numbers=True)
    for variant in variants:
        if variant.result.cut_short:
            made, planned = sum(map(len, variant.result.ends)), len(variant.result.ends)
            steps = f"{made:,} steps of {planned} pipelines"
            print_line(console, f"* {variant.name}: {variant.result.cut_short}; {steps} were made")
    seldom = {
        variant.job.sync.policy: variant
        for variant in variants
        if variant.job.sync.steps_between > 1
    }
    for policy, variant in seldom.items():
        every = f"note: {policy} averages once in {variant.job.sync.steps_between:,} steps"
        none = f", and so never in these {variant.num_steps:.4g}"
        print_line(console, every if variant.result.group_sizes else every + none)


def show_links(variant: Variant, console: Console) -> None:
    """Which links are in use most of the time, by their own bandwidth."""
    sent, regions = variant.result.bytes_sent, variant.job.cluster.regions
    places = [regions.index(device.region) for device in variant.job.cluster.devices]
    pairs = Counter((places[a], places[b]) for a, b in _connected(variant.job))
    busy = {
        (a, b): float(sent[a, b])
        / variant.job.cluster.bandwidth[a][b]
        / variant.result.duration
        / number
        for (a, b), number in pairs.items()
        if sent[a, b] > 0
    }
    links = sorted(busy, key=lambda link: (-busy[link], link))[:_BUSIEST]
    if links:
        names = [f"{regions[a]} -> {regions[b]}" for a, b in links]
        sizes = _in_one_unit([_each_step(variant, sent[link]) for link in links], Bytes)
        rows = zip(names, (f"{busy[link]:.1%}" for link in links), sizes, strict=True)
        print_line(console, "")
        title = f"busiest links, {variant.name}"
        print_table(console, ["", "busy", "sent/step"], list(rows), title=title, numbers=True)


def show_losses(
    variants: Sequence[Variant], kills: Sequence[Kill], length: Seconds, console: Console
) -> None:
    """How many losses of a recording of spot instances fell into the time that was simulated."""
    job = variants[0].job
    used = {job.cluster.devices[run.device].name for one in job.pipelines for run in one.runs}
    times = [kill.at for kill in kills if kill.device in used]
    first = f", the first after {show(min(times), Seconds)}" if times else ""
    print_line(console, "")
    print_line(
        console,
        f"the recording lasts {show(length, Seconds)}; losses of devices of the plan: "
        f"{len(times):,}{first}",
    )
    num_lost = [sum(at <= variant.result.duration for at in times) for variant in variants]
    for variant, lost in zip(variants, num_lost, strict=True):
        simulated = f"in the {show(variant.result.duration, Seconds)} that were simulated"
        print_line(console, f"{variant.name}: {lost or 'none'} of them {simulated}")
    if not any(num_lost):
        more = "more --steps, or a recording that --spot-duration squeezes, may have some"
        print_line(console, f"nothing was lost, so this says nothing of losses: {more}")


def show_curves(curves: Sequence[tuple[str, ConvergenceCurve]], console: Console) -> None:
    """When each is as good as the worst one is in the end, and how it ends."""
    finals = [curve.final_loss for _, curve in curves if curve.final_loss < curve.losses[0]]
    target = max(finals, default=curves[0][1].losses[0])
    times = _in_one_unit([curve.time_to(target) for _, curve in curves], Seconds)
    rows = [
        [
            name,
            f"{curve.losses[0]:.4g}",
            f"{curve.final_loss:.4g}" if curve.final_loss < curve.losses[0] else "diverged",
            f"{curve.distances[-1]:.3g}",
            takes,
            f"{curve.steps_to(target):.1f}".replace("inf", "-"),
        ]
        for (name, curve), takes in zip(curves, times, strict=True)
    ]
    to = f"to {target:.4g}"
    header = ["", "first loss", "final loss", "distance", f"time {to}", f"steps {to}"]
    print_line(console, "")
    print_table(console, header, rows, title="a small problem", numbers=True)


def _row(variant: Variant, first: Variant, step: str, sent: str) -> list[str]:
    result = variant.result
    ratio = result.throughput / first.result.throughput if first.result.throughput else float("nan")
    return [
        f"{variant.name} *" if result.cut_short else variant.name,
        step,
        f"{result.throughput:,.4g}",
        f"{ratio:.2f}" if ratio == ratio else "-",
        f"{result.computing:.0%}",
        f"{result.bubble:.0%}",
        f"{result.waiting:.0%}",
        f"{result.group_size:.1f}" if result.group_sizes else "-",
        f"{result.spread:.1f}" if result.group_sizes else "-",
        sent,
        "-" if variant.price is None else f"{variant.price:.4g}",
    ]


def _each_step(variant: Variant, amount: float) -> float:
    return float(amount) / max(variant.num_steps, 1)


def _in_one_unit(values: Sequence[float], kind: object) -> list[str]:
    """The largest in which one of them is at least 1; what never ends is a dash."""
    unit = unit_of(kind)
    most = max((value for value in values if math.isfinite(value)), default=0.0)
    spellings = _UNITS[unit.quantity]
    shown = next((each for each in spellings if most >= unit.scale[each]), spellings[-1])
    return [
        f"{_digits(value / unit.scale[shown])}{shown}" if math.isfinite(value) else "-"
        for value in values
    ]


def _digits(value: float) -> str:
    """Four of them, or all before the point."""
    return f"{value:.4g}" if value < 9999.5 else f"{value:,.0f}"


def _connected(job: SimulatedJob) -> set[tuple[int, int]]:
    """Devices that may send to one another: neighbours in a pipeline, and who holds a stage."""
    pairs: set[tuple[int, int]] = set()
    for pipeline in job.pipelines:
        for a, b in pairwise(run.device for run in pipeline.runs):
            pairs |= {(a, b), (b, a)}
    server = job.pipelines[0].runs[0].device if job.coordinator is None else job.coordinator
    for stage in range(len(job.stages)):
        held = {r.device for one in job.pipelines for r in one.runs if r.first <= stage < r.end}
        if job.sync.policy == "ssp":
            held.discard(server)
            pairs |= {(server, device) for device in held} | {(device, server) for device in held}
        else:
            pairs |= set(permutations(held, 2))
    return pairs

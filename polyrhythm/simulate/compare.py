"""Ways to run a job, side by side: what each takes, waits for, sends and costs."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

from rich.console import Console

from polyrhythm.describe.scenario import Kill
from polyrhythm.describe.units import show, unit_of
from polyrhythm.simulate.converge import Curve
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.result import Simulated
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import Bytes, Seconds

_HOUR: Seconds = 3600.0
_GIGABYTE = 1e9
_BUSIEST = 5  # links that are listed with what they carry
# Large to small; people compare the figures of a column.
_UNITS = {"time": ("s", "ms", "us"), "size": ("GiB", "MiB", "KiB", "B")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One of them: a policy, a schedule, what if."""

    name: str
    job: SimulatedJob
    found: Simulated

    @property
    def num_steps(self) -> float:
        """Global ones, that were made."""
        return sum(map(len, self.found.ends)) / len(self.found.ends)

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
            hours += price * self.found.present[device] / _HOUR
        egress = 0.0
        for place, price in enumerate(cluster.egress_price_per_gb):
            sent = self.found.bytes_sent[place].sum() - self.found.bytes_sent[place, place]
            egress += price * float(sent) / _GIGABYTE
        return (hours + egress) / num_steps


def show_ways(ways: Sequence[Way], console: Console) -> None:
    """The first is what the others are compared with."""
    header = [
        *("", "step", "samples/s", "of first", "busy", "bubble", "wait"),
        *("group", "apart", "sent/step", "price/step"),
    ]
    times = _in_one_unit([way.found.step_time for way in ways], Seconds)
    sent = _in_one_unit([_each_step(way, way.found.bytes_sent.sum()) for way in ways], Bytes)
    rows = [_row(way, ways[0], *cells) for way, *cells in zip(ways, times, sent, strict=True)]
    print_table(console, header, rows, numbers=True)
    for way in ways:
        if way.found.cut_short:
            made, planned = sum(map(len, way.found.ends)), len(way.found.ends)
            steps = f"{made:,} steps of {planned} pipelines"
            print_line(console, f"* {way.name}: {way.found.cut_short}; {steps} were made")
    seldom = {way.job.sync.policy: way for way in ways if way.job.sync.steps_between > 1}
    for policy, way in seldom.items():
        every = f"note: {policy} averages once in {way.job.sync.steps_between:,} steps"
        none = f", and so never in these {way.num_steps:.4g}"
        print_line(console, every if way.found.group_sizes else every + none)


def show_links(way: Way, console: Console) -> None:
    """Which links are in use most of the time, by their own bandwidth."""
    sent, regions = way.found.bytes_sent, way.job.cluster.regions
    places = [regions.index(device.region) for device in way.job.cluster.devices]
    pairs = Counter((places[a], places[b]) for a, b in _connected(way.job))
    busy = {
        (a, b): float(sent[a, b]) / way.job.cluster.bandwidth[a][b] / way.found.duration / number
        for (a, b), number in pairs.items()
        if sent[a, b] > 0
    }
    links = sorted(busy, key=lambda link: (-busy[link], link))[:_BUSIEST]
    if links:
        names = [f"{regions[a]} -> {regions[b]}" for a, b in links]
        sizes = _in_one_unit([_each_step(way, sent[link]) for link in links], Bytes)
        rows = zip(names, (f"{busy[link]:.1%}" for link in links), sizes, strict=True)
        print_line(console, "")
        title = f"busiest links, {way.name}"
        print_table(console, ["", "busy", "sent/step"], list(rows), title=title, numbers=True)


def show_losses(
    ways: Sequence[Way], kills: Sequence[Kill], length: Seconds, console: Console
) -> None:
    """How many losses of a recording of spot instances fell into the time that was simulated."""
    job = ways[0].job
    used = {job.cluster.devices[run.device].name for one in job.pipelines for run in one.runs}
    times = [kill.at for kill in kills if kill.device in used]
    first = f", the first after {show(min(times), Seconds)}" if times else ""
    print_line(console, "")
    print_line(
        console,
        f"the recording lasts {show(length, Seconds)}; losses of devices of the plan: "
        f"{len(times):,}{first}",
    )
    num_lost = [sum(at <= way.found.duration for at in times) for way in ways]
    for way, lost in zip(ways, num_lost, strict=True):
        simulated = f"in the {show(way.found.duration, Seconds)} that were simulated"
        print_line(console, f"{way.name}: {lost or 'none'} of them {simulated}")
    if not any(num_lost):
        more = "more --steps, or a recording that --spot-duration squeezes, may have some"
        print_line(console, f"nothing was lost, so this says nothing of losses: {more}")


def show_curves(curves: Sequence[tuple[str, Curve]], console: Console) -> None:
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


def _row(way: Way, first: Way, step: str, sent: str) -> list[str]:
    found = way.found
    ratio = found.throughput / first.found.throughput if first.found.throughput else float("nan")
    return [
        f"{way.name} *" if found.cut_short else way.name,
        step,
        f"{found.throughput:,.4g}",
        f"{ratio:.2f}" if ratio == ratio else "-",
        f"{found.computing:.0%}",
        f"{found.bubble:.0%}",
        f"{found.waiting:.0%}",
        f"{found.group_size:.1f}" if found.group_sizes else "-",
        f"{found.spread:.1f}" if found.group_sizes else "-",
        sent,
        "-" if way.price is None else f"{way.price:.4g}",
    ]


def _each_step(way: Way, amount: float) -> float:
    return float(amount) / max(way.num_steps, 1)


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

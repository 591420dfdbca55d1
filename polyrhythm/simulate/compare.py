"""Tables that compare variants of a job: time, waits, bytes sent and price."""

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
_BUSIEST = 5  # links that are listed
_MAX_CHANGES = 4  # losses and returns of a variant that are listed
# Largest first; a column has one unit, so that its figures can be compared.
_UNITS = {"time": ("s", "ms", "us"), "size": ("GiB", "MiB", "KiB", "B")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One variant of a job (a policy, a schedule, a what-if) and its result."""

    name: str
    job: SimulatedJob
    result: SimulationResult

    @property
    def num_steps(self) -> float:
        """Number of global steps that were simulated."""
        result = self.result
        if result.shares is not None:
            return sum(map(sum, result.shares)) / sum(result.samples)
        return sum(map(len, result.ends)) / len(result.ends)

    @property
    def price(self) -> float | None:
        """Price of a step; None if a device has no price. An absent device costs nothing."""
        cluster, num_steps = self.job.cluster, self.num_steps
        used = {run.device for pipeline in self.job.pipelines for run in pipeline.runs}
        hours = 0.0
        for device in sorted(used):
            price = cluster.devices[device].price_per_hour
            if price is None or not num_steps:
                return None
            hours += price * self.result.present[device] / _HOUR
        egress = 0.0
        for region, price in enumerate(cluster.egress_price_per_gb):
            sent = self.result.bytes_sent[region].sum() - self.result.bytes_sent[region, region]
            egress += price * float(sent) / _GIGABYTE
        return (hours + egress) / num_steps


def show_variants(variants: Sequence[Variant], console: Console) -> None:
    """Print one row per variant, with throughputs relative to the first."""
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
        if variant.result.stop_reason:
            num_steps, planned = sum(map(len, variant.result.ends)), len(variant.result.ends)
            steps = f"{num_steps:,} steps of {planned} pipelines"
            print_line(console, f"* {variant.name}: {variant.result.stop_reason}; {steps} were run")
    _show_changes(variants, console)
    with_local_steps = {
        variant.job.sync.policy: variant
        for variant in variants
        if variant.job.sync.steps_between > 1
    }
    for policy, variant in with_local_steps.items():
        note = f"note: {policy} averages once in {variant.job.sync.steps_between:,} steps"
        never = f", so never in these {variant.num_steps:.4g}"
        print_line(console, note if variant.result.group_sizes else note + never)


def _show_changes(variants: Sequence[Variant], console: Console) -> None:
    """Print what followed from losses in exact modes."""
    for variant in variants:
        changes = variant.result.changes
        for change in changes[:_MAX_CHANGES]:
            pause = show(change.resumed - change.at, Seconds)
            why = f"after {pause}: {change.why}"
            at = show(change.at, Seconds)
            print_line(console, f"{variant.name}: at {at} {change.what}; {why}")
        if len(changes) > _MAX_CHANGES:
            print_line(console, f"{variant.name}: {len(changes) - _MAX_CHANGES} more such changes")


def show_links(variant: Variant, console: Console) -> None:
    """Print the busiest links, relative to their bandwidth."""
    sent, regions = variant.result.bytes_sent, variant.job.cluster.regions
    region_of = [regions.index(device.region) for device in variant.job.cluster.devices]
    pairs = Counter((region_of[a], region_of[b]) for a, b in _connected(variant.job))
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
    """Print how many losses of a spot-instance recording fall into the simulated time."""
    job = variants[0].job
    used = {job.cluster.devices[run.device].name for p in job.pipelines for run in p.runs}
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
        simulated = f"in the simulated {show(variant.result.duration, Seconds)}"
        print_line(console, f"{variant.name}: {lost or 'none'} of them {simulated}")
    if not any(num_lost):
        more = "use more --steps, or compress the recording by --spot-duration"
        print_line(console, f"no device was lost, so this shows no effect of losses: {more}")


def show_curves(curves: Sequence[tuple[str, ConvergenceCurve]], console: Console) -> None:
    """Print final losses, and the time of each curve to the worst final loss."""
    finals = [curve.final_loss for _, curve in curves if curve.final_loss < curve.losses[0]]
    target = max(finals, default=curves[0][1].losses[0])
    times = _in_one_unit([curve.time_to(target) for _, curve in curves], Seconds)
    rows = [
        [
            name,
            f"{curve.losses[0]:.4g}",
            f"{curve.final_loss:.4g}" if curve.final_loss < curve.losses[0] else "diverged",
            f"{curve.distances[-1]:.3g}",
            duration,
            f"{curve.steps_to(target):.1f}".replace("inf", "-"),
        ]
        for (name, curve), duration in zip(curves, times, strict=True)
    ]
    to = f"to {target:.4g}"
    header = ["", "first loss", "final loss", "distance", f"time {to}", f"steps {to}"]
    print_line(console, "")
    print_table(console, header, rows, title="a small problem", numbers=True)


def _row(variant: Variant, first: Variant, step: str, sent: str) -> list[str]:
    result = variant.result
    ratio = result.throughput / first.result.throughput if first.result.throughput else float("nan")
    return [
        f"{variant.name} *" if result.stop_reason else variant.name,
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
    """Format values in the largest unit in which one of them is 1 or more; infinity as a dash."""
    unit = unit_of(kind)
    largest = max((value for value in values if math.isfinite(value)), default=0.0)
    names = _UNITS[unit.quantity]
    shown = next((name for name in names if largest >= unit.scale[name]), names[-1])
    return [
        f"{_digits(value / unit.scale[shown])}{shown}" if math.isfinite(value) else "-"
        for value in values
    ]


def _digits(value: float) -> str:
    """Format with four digits, or with all digits before the decimal point."""
    return f"{value:.4g}" if value < 9999.5 else f"{value:,.0f}"


def _connected(job: SimulatedJob) -> set[tuple[int, int]]:
    """Pairs of devices that may communicate: neighbours in a pipeline, holders of one stage."""
    pairs: set[tuple[int, int]] = set()
    for pipeline in job.pipelines:
        for a, b in pairwise(run.device for run in pipeline.runs):
            pairs |= {(a, b), (b, a)}
    server = job.pipelines[0].runs[0].device if job.coordinator is None else job.coordinator
    for stage in range(len(job.stages)):
        holders = {r.device for p in job.pipelines for r in p.runs if r.first <= stage < r.end}
        if job.sync.mode.has_server:
            holders.discard(server)
            pairs |= {(server, d) for d in holders} | {(d, server) for d in holders}
        else:
            pairs |= set(permutations(holders, 2))
    return pairs

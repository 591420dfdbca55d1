"""Ways to run a job, side by side: what each takes, waits for, sends and costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from polyrhythm.describe.units import show
from polyrhythm.simulate.converge import Curve
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.result import Simulated
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import Bytes, Seconds

_HOUR: Seconds = 3600.0
_GIGABYTE = 1e9
_BUSIEST = 5  # links that are listed with what they carry


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
    print_table(console, header, [_row(way, ways[0]) for way in ways], numbers=True)
    for way in ways:
        if way.found.cut_short:
            made, planned = sum(map(len, way.found.ends)), len(way.found.ends)
            steps = f"{made:,} steps of {planned} pipelines"
            print_line(console, f"* {way.name}: {way.found.cut_short}; {steps} were made")


def show_links(way: Way, console: Console) -> None:
    """Which links carry most."""
    sent, regions = way.found.bytes_sent, way.job.cluster.regions
    links = sorted(
        ((float(sent[a, b]), x, y) for a, x in enumerate(regions) for b, y in enumerate(regions)),
        key=lambda link: (-link[0], link[1:]),
    )
    rows = [
        (f"{a} -> {b}", show(round(size / max(way.num_steps, 1)), Bytes))
        for size, a, b in links[:_BUSIEST]
        if size > 0
    ]
    if rows:
        title = f"busiest links, {way.name}"
        print_table(console, ["", "sent/step"], rows, title=title, numbers=True)


def show_curves(curves: Sequence[tuple[str, Curve]], console: Console) -> None:
    """When each is as good as the worst one is in the end, and how it ends."""
    finals = [curve.final_loss for _, curve in curves if curve.final_loss < curve.losses[0]]
    target = max(finals, default=curves[0][1].losses[0])
    rows = [
        [
            name,
            f"{curve.losses[0]:.4g}",
            f"{curve.final_loss:.4g}" if curve.final_loss < curve.losses[0] else "diverged",
            f"{curve.distances[-1]:.3g}",
            show(curve.time_to(target), Seconds),
            f"{curve.steps_to(target):.1f}",
        ]
        for name, curve in curves
    ]
    to = f"to {target:.4g}"
    header = ["", "first loss", "final loss", "distance", f"time {to}", f"steps {to}"]
    print_table(console, header, rows, title="a small problem", numbers=True)


def _row(way: Way, first: Way) -> list[str]:
    found = way.found
    ratio = found.throughput / first.found.throughput if first.found.throughput else float("nan")
    sent = float(found.bytes_sent.sum()) / max(way.num_steps, 1)
    return [
        f"{way.name} *" if found.cut_short else way.name,
        show(found.step_time, Seconds) if found.throughput else "-",
        f"{found.throughput:,.4g}",
        f"{ratio:.2f}" if ratio == ratio else "-",
        f"{found.computing:.0%}",
        f"{found.bubble:.0%}",
        f"{found.waiting:.0%}",
        f"{found.group_size:.1f}" if found.group_sizes else "-",
        f"{found.spread:.1f}" if found.group_sizes else "-",
        show(round(sent), Bytes),
        "-" if way.price is None else f"{way.price:.4g}",
    ]

"""A description as a table: what a cluster, model or scenario file says, once understood."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.describe.scenario import Scenario
from polyrhythm.describe.units import show as text
from polyrhythm.types import Bytes, BytesPerSecond, Seconds


def show(kind: Literal["cluster", "model", "scenario"], source: str, console: Console) -> None:
    """Load it, which checks it, and print it; raises DescriptionError."""
    showing: dict[str, Callable[[str, Console], None]] = {
        "cluster": _show_cluster,
        "model": _show_model,
        "scenario": _show_scenario,
    }
    showing[kind](source, console)


def _show_cluster(source: str, console: Console) -> None:
    cluster = Cluster.load(source)
    _print(
        console, f"{cluster.name}: {len(cluster.devices)} devices, {len(cluster.regions)} regions"
    )
    if cluster.source:
        _print(console, f"source: {cluster.source}")
    num_devices = Counter(device.region for device in cluster.devices)
    kinds = ", ".join(f"{region} {num_devices[region]}" for region in cluster.regions)
    _print(console, f"devices: {kinds}")
    _print_matrix(console, "one-way latency, ms", cluster, cluster.latency, 1e-3)
    _print_matrix(console, "bandwidth, Mbit/s", cluster, cluster.bandwidth, 125e3)


def _print_matrix(
    console: Console, title: str, cluster: Cluster, matrix: Sequence[Sequence[float]], unit: float
) -> None:
    table = _table("from", *cluster.regions, title=title)
    num_devices = Counter(device.region for device in cluster.devices)
    for row, region in enumerate(cluster.regions):
        alone = num_devices[region] < 2  # nobody to talk to inside its region
        cells = [
            "-" if alone and row == column else f"{value / unit:.6g}"
            for column, value in enumerate(matrix[row])
        ]
        table.add_row(region, *cells)
    _print_table(console, table)


def _show_model(source: str, console: Console) -> None:
    model = ModelProfile.load(source)
    _print(
        console,
        f"{model.name}: {len(model.layers)} layers, micro-batch of {model.microbatch_size}",
    )
    table = _table("layer", "forward", "backward", "parameters", "output", "stored")
    for layer in model.layers:
        sizes = (layer.parameter_bytes, layer.activation_bytes, layer.stored_bytes)
        table.add_row(
            layer.name,
            text(layer.forward, Seconds),
            text(layer.backward, Seconds),
            *(text(size, Bytes) for size in sizes),
        )
    _print_table(console, table)


def _show_scenario(source: str, console: Console) -> None:
    scenario = Scenario.load(source)
    _print(console, f"{scenario.name}: seed {scenario.seed}")
    events: list[tuple[float, str, str, str]] = []
    for slow in scenario.slow:
        until = "" if slow.until is None else f" until {text(slow.until, Seconds)}"
        if slow.factor is not None:
            how = f"{slow.factor:g} times as slow"
        elif slow.trace is not None:
            how = f"as in {slow.trace}"
        else:
            how = f"sleeps {slow.sleep_factor:g} (F+B) with probability {slow.probability:g}"
        events.append((slow.start, "slow", slow.device, how + until))
    for change in scenario.link:
        parts = {
            "latency": None if change.latency is None else text(change.latency, Seconds),
            "bandwidth": None
            if change.bandwidth is None
            else text(change.bandwidth, BytesPerSecond),
            "link": None if change.up is None else ("up" if change.up else "lost"),
        }
        what = ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
        arrow = "->" if change.one_way else "<->"
        events.append((change.at, "link", f"{change.source} {arrow} {change.target}", what))
    for pause in scenario.pause:
        events.append((pause.at, "pause", pause.device, f"until {text(pause.until, Seconds)}"))
    events += [(kill.at, "kill", kill.device, "") for kill in scenario.kill]
    events += [(join.at, "join", join.device, "") for join in scenario.join]
    table = _table("at", "event", "whom", "what")
    for at, kind, whom, what in sorted(events):
        table.add_row(text(at, Seconds), kind, whom, what)
    _print_table(console, table)


def _table(first: str, *others: str, title: str | None = None) -> Table:
    return Table(first, *others, box=box.SIMPLE_HEAD, title=title, title_justify="left")


def _print_table(console: Console, table: Table) -> None:
    """As wide as it is: a number cut short to fit a narrow screen is a wrong number."""
    endless = console.options.update(max_width=10_000)
    width = Measurement.get(console, endless, table).maximum
    Console(file=console.file, width=max(width, console.width)).print(table)


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)

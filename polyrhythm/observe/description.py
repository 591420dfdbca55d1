"""Print a description as tables: the content of a cluster, model or scenario file."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from rich.console import Console

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.describe.scenario import LinkChange, Scenario, Slow
from polyrhythm.describe.units import show as text
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import Bytes, BytesPerSecond, Seconds


def show(
    kind: Literal["cluster", "model", "scenario"],
    source: str,
    console: Console,
    *,
    cluster: str | None = None,
) -> None:
    """Load, check and print a description; raise DescriptionError if it is wrong.

    A scenario is also checked against `cluster`, if given.
    """
    if kind == "cluster":
        _show_cluster(Cluster.load(source), console)
    elif kind == "model":
        _show_model(ModelProfile.load(source), console)
    else:
        scenario = Scenario.load(source)
        if cluster is not None:
            scenario.check(Cluster.load(cluster))
        _show_scenario(scenario, console)


def _show_cluster(cluster: Cluster, console: Console) -> None:
    print_line(
        console, f"{cluster.name}: {len(cluster.devices)} devices, {len(cluster.regions)} regions"
    )
    _show_origin(cluster, console)
    kinds = Counter(
        (device.region, device.memory, device.speed, device.flops, device.price_per_hour)
        for device in cluster.devices
    )
    rows = [
        [
            region,
            str(count),
            "-" if memory is None else text(memory, Bytes),
            f"{speed:g}",
            "-" if flops is None else f"{flops / 1e9:.4g}",
            "-" if price is None else f"{price:g}",
        ]
        for (region, memory, speed, flops, price), count in kinds.items()
    ]
    print_table(console, ["region", "devices", "memory", "speed", "GFLOPS", "price/h"], rows)
    _print_matrix(console, "one-way latency, ms", cluster, cluster.latency, 1e-3)
    _print_matrix(console, "bandwidth, Mbit/s", cluster, cluster.bandwidth, 125e3)
    if cluster.latency_spread:
        _print_matrix(console, "spread of latency, %", cluster, cluster.latency_spread, 0.01)
    if cluster.bandwidth_spread:
        _print_matrix(console, "spread of bandwidth, %", cluster, cluster.bandwidth_spread, 0.01)
    if cluster.nccl_latency:
        _print_matrix(console, "latency over NCCL, ms", cluster, cluster.nccl_latency, 1e-3)
    if cluster.nccl_bandwidth:
        title = "bandwidth over NCCL, Mbit/s"
        _print_matrix(console, title, cluster, cluster.nccl_bandwidth, 125e3)


def _show_origin(described: Cluster | ModelProfile, console: Console) -> None:
    if described.source:
        print_line(console, f"source: {described.source}")
    if described.measured_at:
        print_line(console, f"measured at {described.measured_at}")


def _print_matrix(
    console: Console, title: str, cluster: Cluster, matrix: Sequence[Sequence[float]], unit: float
) -> None:
    num_devices = Counter(device.region for device in cluster.devices)
    rows = []
    for row, region in enumerate(cluster.regions):
        has_no_link = num_devices[region] < 2  # no second device inside the region
        cells = [
            "-" if has_no_link and row == column else f"{value / unit:.6g}"
            for column, value in enumerate(matrix[row])
        ]
        rows.append([region, *cells])
    print_table(console, ["from", *cluster.regions], rows, title=title)


def _show_model(model: ModelProfile, console: Console) -> None:
    print_line(
        console, f"{model.name}: {len(model.layers)} layers, micro-batch of {model.microbatch_size}"
    )
    _show_origin(model, console)
    if model.flops is not None:
        print_line(console, f"a device of speed 1 does {model.flops / 1e9:.4g} GFLOPS")
    rows = [
        [
            layer.name,
            _with_spread(layer.forward, layer.forward_spread),
            _with_spread(layer.backward, layer.backward_spread),
            text(layer.parameter_bytes, Bytes),
            text(layer.activation_bytes, Bytes),
            text(layer.stored_bytes, Bytes),
        ]
        for layer in model.layers
    ]
    print_table(console, ["layer", "forward", "backward", "parameters", "output", "stored"], rows)
    if len(model.microbatch_sizes) > 1:
        _show_sizes(model, console)


def _with_spread(time: Seconds, spread: float | None) -> str:
    return text(time, Seconds) + ("" if spread is None else f" ±{spread / 2:.0%}")


def _show_sizes(model: ModelProfile, console: Console) -> None:
    rows = []
    for size in model.microbatch_sizes:
        layers = model.at(size).layers
        rows.append(
            [
                str(size),
                text(sum(layer.forward for layer in layers), Seconds),
                text(sum(layer.backward for layer in layers), Seconds),
                text(sum(layer.stored_bytes for layer in layers), Bytes),
            ]
        )
    title = "all layers, by micro-batch size"
    print_table(console, ["samples", "forward", "backward", "stored"], rows, title=title)


def _show_scenario(scenario: Scenario, console: Console) -> None:
    print_line(console, f"{scenario.name}: seed {scenario.seed}")
    events = [(slow.start, "slow", slow.device, _slowdown(slow)) for slow in scenario.slow]
    for change in scenario.link:
        arrow = "->" if change.one_way else "<->"
        target = f"{change.source} {arrow} {change.target}"
        events.append((change.at, "link", target, _changes(change)))
    for pause in scenario.pause:
        events.append((pause.at, "pause", pause.device, f"until {text(pause.until, Seconds)}"))
    events += [(kill.at, "kill", kill.device, "") for kill in scenario.kill]
    events += [(join.at, "join", join.device, "") for join in scenario.join]
    rows = [[text(at, Seconds), *cells] for at, *cells in sorted(events)]
    print_table(console, ["at", "event", "target", "change"], rows)


def _slowdown(slow: Slow) -> str:
    if slow.factor is not None:
        change = f"{slow.factor:g} times as slow"
    elif slow.trace is not None:
        change = f"as recorded in {slow.trace}"
        if slow.trace_worker is not None:
            change += f" by worker {slow.trace_worker}"
        if slow.trace_duration is not None:
            change += f", scaled to {text(slow.trace_duration, Seconds)}"
    else:
        change = f"sleeps {slow.sleep_factor:g} (F+B) with probability {slow.probability:g}"
    return change if slow.until is None else f"{change} until {text(slow.until, Seconds)}"


def _changes(change: LinkChange) -> str:
    parts = []
    if change.latency is not None:
        parts.append(f"latency {text(change.latency, Seconds)}")
    if change.bandwidth is not None:
        parts.append(f"bandwidth {text(change.bandwidth, BytesPerSecond)}")
    if change.up is not None:
        parts.append("up" if change.up else "lost")
    return ", ".join(parts)

"""Reduce-scatter and all-gather apart (DeAR) against DDP and FSDP2, on slow and distant links.

Two and four workers on hosts of the lab, real gloo processes, emulated compute. All sides are in
the same processes and take turns; DDP and ours are swept over bucket sizes and compared at their
best; the tuned bucket is compared with a grid of sizes. Plain messages measure the bandwidth, which
goes into the paper's bounds. With four workers, all that a host sends to other nodes shares one
line.
"""

import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console

from benchmarks.decoupled import settings
from benchmarks.decoupled.collectives import (
    ALL_REDUCE,
    BOTH,
    GATHER,
    GLOO,
    SCATTER,
    CollectiveRow,
    milliseconds,
)
from benchmarks.decoupled.rounds import DecoupledPool, MeasuredSetting, cluster, measure
from benchmarks.decoupled.settings import DDP, HIERARCHICAL, OURS, TUNED
from benchmarks.harness.report import Bar, Result, print_bars, print_rows, ratio_over_rounds, select
from polyrhythm.describe.units import show
from polyrhythm.lab.lab import Lab
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import BytesPerSecond

BARS = (
    Bar("bytes", "<=", 1.02, "bytes on the wire over DDP's"),
    Bar("speed", ">=", 1.15, "DDP's step over ours, 2 workers"),
    Bar("of_theory", ">=", 0.90, "the same, over the ratio of the paper's bounds"),
    Bar("latency20_2", ">=", 1.20, "DDP's step over ours, 20 ms apart, 2 workers"),
    Bar("latency20_4", ">=", 1.30, "the same, 4 workers"),
    Bar("slow_backward", ">=", 0.97, "DDP's step over ours, backward of 3 forwards"),
    Bar("fsdp2", ">=", 1.8, "FSDP2's step over ours"),
    Bar("of_smax", ">=", 0.90, "speedup over equation 6's"),
    Bar("tuned", "<=", 1.05, "step with the tuned bucket over the best of a grid"),
    Bar("state", "<=", 1.02 / 4, "AdamW's state over DDP's, 4 workers"),
)

Settings = Mapping[str, MeasuredSetting]  # by name


def run(*, quick: bool, console: Console) -> Result:
    suite = settings.QUICK_SUITE if quick else settings.FULL_SUITE
    measured: dict[str, MeasuredSetting] = {}
    collectives: list[CollectiveRow] = []
    deadline = time.monotonic()
    for num_workers in sorted({setting.num_workers for setting in suite.settings}):
        with Lab(cluster(num_workers)) as lab, DecoupledPool(lab) as pool:
            for setting in suite.settings:
                if setting.num_workers == num_workers:
                    deadline += setting.budget  # a setting may use what earlier ones left
                    measured[setting.name] = measure(pool, setting, deadline=deadline)
                    _print_setting(console, measured[setting.name])
            network = suite.collectives
            pool.set_network(network.latency, network.bandwidth, uplink=num_workers > 2)
            collectives += pool.call("time_collectives", network)[0]
    _print_collectives(console, collectives)
    ratios = ratios_of(measured)
    print_bars(console, BARS, ratios, quick=quick)
    return Result(
        bench="decoupled",
        ratios=ratios,
        figures=_figures(measured, collectives),
        rows=[*(row for each in measured.values() for row in each.rows), *collectives],
    )


def ratios_of(measured: Settings) -> dict[str, float]:
    speed = measured["speed"]
    return {
        "bytes": max(_bytes(m) for m in measured.values() if m.setting.has(DDP)),
        "speed": speed.ratio(DDP, OURS),
        "of_theory": speed.ratio(DDP, OURS) / theory(speed),
        "latency20_2": measured["latency20_2"].ratio(DDP, OURS),
        "latency20_4": measured["latency20_4"].ratio(DDP, OURS),
        "slow_backward": measured["slow_backward"].ratio(DDP, OURS),
        "fsdp2": speed.ratio(settings.FSDP2, OURS),
        "of_smax": of_smax(speed),
        "tuned": measured["tuned"].ratio(TUNED, OURS),
        "state": measured["latency20_4"].state,
    }


def theory(measured: MeasuredSetting) -> float:
    """Return equation 8 over equation 7, for the measured network."""
    return measured.times.coupled / measured.times.decoupled


def of_smax(measured: MeasuredSetting) -> float:
    """Return the speedup of all workers over one, as a share of equation 6's maximum."""
    num_workers, times = measured.setting.num_workers, measured.times
    speedup = num_workers * times.compute / measured.seconds(measured.best(OURS))
    return speedup / times.max_speedup(num_workers)


def first_guess(measured: MeasuredSetting) -> float:
    """Return the step with the untuned bucket size over the best of the grid."""
    guess = settings.DecoupledSide(OURS, settings.FIRST_GUESS).name
    return ratio_over_rounds(measured.rows, "seconds", guess, measured.best(OURS))


def _bytes(measured: MeasuredSetting) -> float:
    return measured.wire_bytes(measured.best(OURS)) / measured.wire_bytes(measured.best(DDP))


def _figures(measured: Settings, collectives: Sequence[CollectiveRow]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, each in measured.items():
        for side in dict.fromkeys(row.side for row in each.rows):
            figures[f"{name}_{side.replace(' ', '_')}_s"] = each.seconds(side)
        figures |= {f"{name}_{of}": figure for of, figure in _figures_of(each).items()}
        figures[f"state_{each.setting.num_workers}"] = each.state
    for num_workers, size in dict.fromkeys((row.num_workers, row.size) for row in collectives):
        rows = select(collectives, num_workers=num_workers, size=size)
        for whose, what in dict.fromkeys((row.whose, row.what) for row in rows):
            ratio = milliseconds(rows, (whose, what)) / milliseconds(rows, (GLOO, ALL_REDUCE))
            figures[f"halves_{num_workers}_{size}_{whose}_{what}"] = ratio
    return figures


def _figures_of(measured: MeasuredSetting) -> dict[str, float]:
    figures = {"goodput_mbit": measured.goodput / 125e3, "difference": measured.difference}
    if measured.setting.has(DDP):
        figures["theory"] = theory(measured)
        figures["of_smax"] = of_smax(measured)
        figures["of_layered"] = measured.layered / measured.seconds(measured.best(OURS))
        figures["bytes"] = _bytes(measured)
    if measured.setting.has(HIERARCHICAL):
        figures["gain"] = measured.ratio(OURS, HIERARCHICAL)
    if measured.tuned is not None:
        figures["trials"] = measured.tuned.num_trials
        figures["bucket_bytes"] = measured.tuned.found.bucket_bytes
        figures["first_guess"] = first_guess(measured)
    return figures


def _print_setting(console: Console, measured: MeasuredSetting) -> None:
    setting, best = measured.setting, measured.seconds(measured.best(OURS))
    print_line(
        console,
        f"{setting.name}: {setting.num_workers} workers, {setting.num_layers} layers of "
        f"{setting.layer_bytes / settings.MIB:.3g} MiB; forward {setting.forward:g} s, backward "
        f"{setting.backward:g} s; {1e3 * setting.latency:g} ms, "
        f"{show(measured.goodput, BytesPerSecond)} measured: all-gather "
        f"{measured.times.all_gather:.3f} s",
    )
    print_rows(
        console,
        dict.fromkeys(row.side for row in measured.rows),
        {
            "side (bucket, MiB)": lambda side: side,
            "step, s": lambda side: f"{measured.seconds(side):.3f}",
            "rounds": lambda side: " ".join(
                f"{row.seconds:.3f}" for row in measured.rows if row.side == side
            ),
            "/ ours": lambda side: f"{measured.seconds(side) / best:.2f}",
            "MB sent": lambda side: f"{measured.wire_bytes(side) / 1e6:.2f}",
        },
    )
    for line in _conclusions(measured):
        print_line(console, line)


def _conclusions(measured: MeasuredSetting) -> Iterator[str]:
    times = measured.times
    if measured.setting.has(DDP):
        yield (
            f"bounds: coupled {times.coupled:.3f} s, decoupled {times.decoupled:.3f} s, "
            f"layer by layer {measured.layered:.3f} s; "
            f"{DDP} / {OURS} {measured.ratio(DDP, OURS):.3f} of {theory(measured):.3f}; "
            f"{of_smax(measured):.1%} of S_max"
        )
    if measured.tuned is not None:
        yield (
            f"tuned to {measured.tuned.found} in {measured.tuned.num_trials} trials: "
            f"{measured.ratio(TUNED, OURS):.3f} of the best of the grid, "
            f"where the first guess is {first_guess(measured):.3f}"
        )
    if measured.setting.has(HIERARCHICAL):
        yield f"{OURS} / {HIERARCHICAL} {measured.ratio(OURS, HIERARCHICAL):.3f}"
    yield (
        f"weights differ by at most {measured.difference:.1g}; "
        f"state of AdamW {measured.state:.4f} of {DDP}'s"
    )
    doubtful = [row for row in measured.rows if row.doubt is not None]
    if doubtful:
        worst = max(doubtful, key=lambda row: row.stolen)
        yield (
            f"not to be trusted: {len(doubtful)} of {len(measured.rows)} measurements, "
            f"such as {worst.side} in round {worst.round + 1}: {worst.doubt}"
        )


def _print_collectives(console: Console, rows: Sequence[CollectiveRow]) -> None:
    cases = [
        (whose, half)
        for half in (SCATTER, GATHER, BOTH)
        for whose in dict.fromkeys(row.whose for row in rows)
    ]
    num_rounds = len({row.round for row in rows})

    def cells(num_workers: int, size: int) -> list[str]:
        of_size = select(rows, num_workers=num_workers, size=size)
        all_reduce = milliseconds(of_size, (GLOO, ALL_REDUCE))
        ratios = [milliseconds(of_size, case) / all_reduce for case in cases]
        return [f"{size / 1024:g} KiB", f"{all_reduce:.1f}", *(f"{ratio:.2f}" for ratio in ratios)]

    for num_workers in dict.fromkeys(row.num_workers for row in rows):
        print_table(
            console,
            ["size", "all-reduce, ms", *(f"{whose} {half}" for whose, half in cases)],
            [cells(num_workers, size) for size in dict.fromkeys(row.size for row in rows)],
            title=f"halves, {num_workers} workers: time over that of gloo's all-reduce "
            f"(median of {num_rounds} rounds)",
            numbers=True,
        )

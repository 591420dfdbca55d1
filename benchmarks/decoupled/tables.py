"""What the benchmark of decoupled all-reduce prints: a table per setting, halves, then the bars."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console

from benchmarks.bars import print_bars
from benchmarks.decoupled.collectives import ALL_REDUCE, BOTH, GATHER, GLOO, SCATTER, HalfRow
from benchmarks.decoupled.ratios import (
    BARS,
    first_guess,
    layered,
    milliseconds,
    of_smax,
    theory,
    to_all_reduce,
    verdict,
)
from benchmarks.decoupled.settings import DDP, MIB, NESTED, OURS, TUNED
from benchmarks.decoupled.steps import Measured
from polyrhythm.describe.units import show
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import BytesPerSecond


def show_setting(console: Console, measured: Measured) -> None:
    setting = measured.setting
    best = measured.seconds(measured.best(OURS))
    print_line(
        console,
        f"{setting.name}: {setting.num_workers} workers, {setting.num_layers} layers of "
        f"{setting.layer_bytes / MIB:.3g} MiB; forward {setting.forward:g} s, backward "
        f"{setting.backward:g} s; {1e3 * setting.latency:g} ms, "
        f"{show(measured.goodput, BytesPerSecond)} measured: all-gather "
        f"{measured.times.all_gather:.3f} s",
    )
    print_table(
        console,
        ["side (bucket, MiB)", "step, s", "rounds", "/ ours", "MB sent"],
        [
            [
                side,
                f"{measured.seconds(side):.3f}",
                " ".join(f"{row.seconds:.3f}" for row in measured.rows if row.side == side),
                f"{measured.seconds(side) / best:.2f}",
                f"{measured.wire_bytes(side) / 1e6:.2f}",
            ]
            for side in dict.fromkeys(row.side for row in measured.rows)
        ],
        numbers=True,
    )
    for line in _conclusions(measured):
        print_line(console, line)


def _conclusions(measured: Measured) -> Iterator[str]:
    times = measured.times
    if measured.setting.has(DDP):
        yield (
            f"bounds: coupled {times.coupled:.3f} s, decoupled {times.decoupled:.3f} s, "
            f"layer by layer {layered(measured):.3f} s; "
            f"{DDP} / {OURS} {measured.ratio(DDP, OURS):.3f} of {theory(measured):.3f}; "
            f"{of_smax(measured):.1%} of S_max"
        )
    if measured.tuned is not None:
        yield (
            f"tuned to {measured.tuned.found} in {measured.tuned.num_trials} trials: "
            f"{measured.ratio(TUNED, OURS):.3f} of the best of the grid, "
            f"where the first guess is {first_guess(measured):.3f}"
        )
    if measured.setting.has(NESTED):
        yield f"{OURS} / {NESTED} {measured.ratio(OURS, NESTED):.3f}"
    yield (
        f"weights differ by {measured.difference:.1g} at most; "
        f"state of AdamW {measured.state:.4f} of {DDP}'s"
    )
    doubtful = [row for row in measured.rows if row.doubt is not None]
    if doubtful:
        worst = max(doubtful, key=lambda row: row.stolen)
        yield (
            f"not to be trusted: {len(doubtful)} of {len(measured.rows)} measurements, "
            f"such as {worst.side} in round {worst.round + 1}: {worst.doubt}"
        )


def show_halves(console: Console, rows: Sequence[HalfRow]) -> None:
    whose = dict.fromkeys(row.whose for row in rows)
    for num_workers in dict.fromkeys(row.num_workers for row in rows):
        print_table(
            console,
            [
                "size",
                "all-reduce, ms",
                *(f"{w} {h}" for h in (SCATTER, GATHER, BOTH) for w in whose),
            ],
            [
                [
                    f"{size / 1024:g} KiB",
                    f"{milliseconds(rows, num_workers, size, GLOO, ALL_REDUCE):.1f}",
                    *(
                        f"{to_all_reduce(rows, num_workers, size, w, half):.2f}"
                        for half in (SCATTER, GATHER, BOTH)
                        for w in whose
                    ),
                ]
                for size in dict.fromkeys(row.size for row in rows)
            ],
            title=f"halves, {num_workers} workers: time over that of gloo's all-reduce "
            f"(median of {_num_rounds(rows)} rounds)",
            numbers=True,
        )


def show_ratios(console: Console, ratios: Mapping[str, float], *, quick: bool) -> None:
    rows = (
        (name, f"{ratios[name]:.4g}", f"{bar:g}", verdict(name, ratios[name]))
        for name, bar in BARS.items()
    )
    print_bars(console, rows, quick=quick)


def _num_rounds(rows: Sequence[HalfRow]) -> int:
    return len({row.round for row in rows})

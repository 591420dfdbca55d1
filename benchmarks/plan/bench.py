"""How good plans are: by DT-FM's cost, by simulated steps, and run in the lab."""

from rich.console import Console

from benchmarks.harness.report import (
    Bar,
    Result,
    print_bars,
    print_disturbed,
    print_rows,
    progress_printer,
)
from benchmarks.plan.lab import lab_ratios, lab_rows
from benchmarks.plan.placements import DtfmRows, dtfm_rows, step_ratios, step_rows
from polyrhythm.plan.search import search_plan

BARS = (
    Bar("optima", ">=", 15, "best known layouts found, of 15 searches"),
    Bar("cpu_s", "<=", 2.0, "CPU seconds of the longest of these searches"),
    Bar("noisy", ">=", 0.15, "cost below that of DT-FM's search, unequal links"),
    Bar("noisy_equal_cpu", ">=", 0.20, "the same with equal CPU time"),
    Bar("n512_s", "<=", 30.0, "CPU seconds of the longest search for 512 devices"),
    Bar("n512_gap", "<=", 0.05, "cost above the best of 512 devices"),
    Bar("vs_random", ">=", 2.7, "simulated step of random placements over ours"),
    Bar("vs_random_worst", ">=", None, "the same, the worst workload"),
    Bar("vs_dtfm", ">=", 1.2, "simulated step of DT-FM's plan over ours, its exchange"),
    Bar("vs_dtfm_ring", ">=", None, "the same with a ring"),
    Bar("vs_dtfm_all_reduce", ">=", None, "the same over all links at once"),
    Bar("vs_dtfm_worst", ">=", 1.0, "the worst cluster and workload"),
    Bar("vs_dtfm_exchange", ">=", None, "DT-FM's plan with its exchange over our plan with ours"),
    Bar("lab_vs_random", ">=", 2.2, "step of random plans over ours, in the lab"),
    Bar("lab_predicted", "<=", 0.15, "error of the predicted step of our plan"),
    Bar("uneven", ">=", 1.75, "equal layers over layers by speed, in the lab"),
)


def run(*, quick: bool, console: Console) -> Result:
    show = progress_printer(console)
    by_dtfm = dtfm_rows(quick=quick, on_progress=show)
    _print_dtfm(console, by_dtfm)
    steps = step_rows(quick=quick, on_progress=show)
    print_rows(
        console,
        steps,
        {
            "cluster": lambda row: row.case,
            "workload": lambda row: str(row.workload),
            "gradients": lambda row: row.sync,
            "ours, s": lambda row: f"{row.ours:.2f}",
            "DT-FM, s": lambda row: f"{row.dtfm:.2f}",
            "/ ours": lambda row: f"{row.vs_dtfm:.3f}",
            "random, s": lambda row: "" if row.random is None else f"{row.random:.2f}",
            "/ ours ": lambda row: "" if row.vs_random is None else f"{row.vs_random:.2f}",
        },
        title="a step, simulated: our placement, DT-FM's, the mean of five random ones",
    )
    in_lab = lab_rows(
        quick=quick, make_plan=lambda problem: search_plan(problem).best.plan, on_progress=show
    )
    print_rows(
        console,
        in_lab,
        {
            "for": lambda row: row.ratio,
            "plan": lambda row: row.side + (" (disturbed)" if row.disturbed else ""),
            "step, s": lambda row: f"{row.measured:.3f}",
            "predicted, s": lambda row: f"{row.predicted:.3f}",
            "error": lambda row: f"{row.error:.3f}",
            "layers": lambda row: " ".join(map(str, row.layers)),
            "micro-batches": lambda row: " ".join(map(str, row.microbatches)),
        },
        title="run in the lab",
    )
    print_disturbed(console, [row.disturbed for row in in_lab])
    in_lab_ratios, in_lab_figures = lab_ratios(in_lab)
    ratios = {**by_dtfm.ratios(), **step_ratios(steps), **in_lab_ratios}
    print_bars(console, BARS, ratios, quick=quick)
    return Result(
        bench="plan",
        ratios=ratios,
        figures={**by_dtfm.figures(), **in_lab_figures},
        rows=[*by_dtfm.optima, *by_dtfm.noisy, *by_dtfm.large, *steps, *in_lab],
    )


def _print_dtfm(console: Console, measured: DtfmRows) -> None:
    print_rows(
        console,
        [*measured.optima, *measured.large],
        {
            "cluster": lambda row: row.case,
            "seed": lambda row: f"{row.seed}",
            "cost, s": lambda row: f"{row.cost:.4f}",
            "best known, s": lambda row: f"{row.best:.4f}",
            "gap to bound": lambda row: f"{row.gap_to_bound:.3f}",
            "found by": lambda row: row.found_by,
            "CPU s": lambda row: f"{row.cpu:.2f}",
        },
        title="DT-FM's cost: clusters whose best layout is known",
    )
    print_rows(
        console,
        measured.noisy,
        {
            "seed": lambda row: f"{row.seed}",
            "ours, s": lambda row: f"{row.cost:.3f}",
            "DT-FM, s": lambda row: f"{row.dtfm_cost:.3f}",
            "equal CPU, s": lambda row: f"{row.dtfm_cost_equal_cpu:.3f}",
            "below": lambda row: f"{row.below:.3f}",
            "equal": lambda row: f"{row.below_equal_cpu:.3f}",
            "gap to bound": lambda row: f"{row.gap_to_bound:.3f}",
            "CPU s, ours / DT-FM": lambda row: f"{row.cpu:.2f} / {row.dtfm_cpu:.2f}",
        },
        title="world-wide, each link times lognormal(0, 0.3): our search and DT-FM's, which also "
        "runs for as many CPU seconds as ours (equal CPU)",
    )

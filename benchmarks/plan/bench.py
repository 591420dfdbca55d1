"""How good plans are: by DT-FM's cost, by a step as it really runs, and carried out in the lab."""

from rich.console import Console

from benchmarks.plan import dtfm_rows
from benchmarks.plan.dtfm_rows import measure_dtfm
from benchmarks.plan.dtfm_tables import show_dtfm
from benchmarks.plan.lab_rows import lab_rows
from benchmarks.plan.real_rows import Row, ratios, real_rows
from benchmarks.plan.tables import show_lab, show_ratios, show_real
from benchmarks.result import Result
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.search import make_plan
from polyrhythm.tables import print_line

BARS = {
    **dtfm_rows.BARS,
    "vs_random": 2.7,
    "vs_dtfm": 1.2,
    "vs_dtfm_worst": 1.0,
    "lab_vs_random": 2.2,
    "lab_predicted": 0.15,
    "uneven": 1.75,
}
AT_MOST = (*dtfm_rows.AT_MOST, "lab_predicted")


def run(*, quick: bool, console: Console) -> Result:
    def say(line: str) -> None:
        if console.is_terminal:
            print_line(console, line)

    def say_row(row: Row) -> None:
        say(f"{row.case}, {row.workload}, {row.sync}: {row.vs_dtfm:.3f} of DT-FM's plan")

    by_dtfm = measure_dtfm(quick=quick, on_progress=say)
    show_dtfm(console, by_dtfm)
    real = real_rows(quick=quick, on_row=say_row)
    show_real(console, real)
    in_lab = lab_rows(quick=quick, make_plan=_planned, on_progress=say)
    show_lab(console, in_lab)
    found = {**by_dtfm.ratios(), **ratios(real), **in_lab.ratios}
    show_ratios(console, found, BARS, AT_MOST, quick=quick)
    return Result(
        bench="plan",
        ratios=found,
        figures={**by_dtfm.figures(), **in_lab.figures},
        rows=[*by_dtfm.optima, *by_dtfm.noisy, *by_dtfm.large, *real, *in_lab.rows],
    )


def _planned(problem: Problem) -> Plan:
    return make_plan(problem).best.plan

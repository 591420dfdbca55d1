"""Print the search for a plan, then the plan: devices of each stage, a step's time, the bound.

Up to `MAX_ROWS` devices get a row each. Otherwise devices of one region share a row if they are
replicas of one stage, or neighbours in one pipeline, whichever gives fewer rows: 64 devices mostly
fit on a screen. Such a row shows the largest figures of its devices.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Self

from rich.console import Console
from rich.markup import escape

from polyrhythm.cost.sync import Sync
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.units import show as text
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.predict import DeviceUse, Prediction
from polyrhythm.plan.replan import ReplanResult
from polyrhythm.plan.search import PlanResult, SearchProgress
from polyrhythm.plan.survivors import machines_without_reserve
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import Bytes, Seconds

MAX_ROWS = 24  # devices that get a row each
MAX_NAMES = 12  # devices named in a line
MAX_LINES = 5  # of a search without a terminal
_NUM_PARTS = 3  # parts of a step's time that are shown
_MILLION = 1_000_000


class PlanProgress:
    """The progress of a search: a status line on a terminal, otherwise a few lines.

    Pass `update` to the search as its callback.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("planning") if console.is_terminal else None
        self._next_line = 0.0  # as a fraction of the search

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def update(self, progress: SearchProgress) -> None:
        line = f"planning {progress.done}/{progress.total}: {progress.doing}"
        if progress.done == 0:  # of the next search
            self._next_line = 0.0
        if progress.best:
            line += f"; best so far {progress.best}"
        if self._status:
            self._status.update(escape(line))
        elif progress.done >= self._next_line * progress.total:
            print_line(self._console, line)
            self._next_line = progress.done / max(1, progress.total) + 1 / MAX_LINES


def show_plan(prediction: Prediction, planned: PlanResult, console: Console) -> None:
    """Print the assignment of devices, then the predicted step and the bound of any plan."""
    plan = prediction.plan
    settings = f"micro-batches of {plan.microbatch_size}, sync {plan.sync}"
    print_line(console, f"{degrees(plan)}, {settings}")
    print_line(console, "")
    if len(prediction.uses) <= MAX_ROWS:
        _show_devices(prediction, console)
    else:
        _show_groups(prediction, console)
    print_line(console, "")
    _show_pipelines(prediction, console)
    print_line(console, "")
    for name, shown in _expected(prediction, planned):
        print_line(console, f"{name:<11}{shown}")


def show_reserve(plan: Plan, cluster: Cluster, console: Console, *, buddy: bool) -> None:
    """Print which machines training can do without; nothing for a single one.

    `buddy`: whether shards have copies, in decoupled.
    """
    machine_of = {device.name: device.host or device.name for device in cluster.devices}
    names = [device for pipeline in plan.pipelines for device in pipeline.devices]
    machines = {rank: machine_of[name] for rank, name in enumerate(names)}
    if len({*machines.values()}) == 1:
        return
    is_sharded = plan.sync == Sync.DECOUPLED
    fatal = machines_without_reserve(plan, machines, buddy=buddy if is_sharded else None)
    if plan.num_pipelines == 1:
        line = "a loss of any device ends the job: there is only one pipeline"
    elif fatal:
        shown = ", ".join(fatal[:MAX_NAMES]) + (" ..." if len(fatal) > MAX_NAMES else "")
        line = f"training cannot go on without any one of {shown}"
    else:
        line = "each machine may be lost: a whole pipeline is left"
    print_line(console, f"{'losses':<11}{line}")


def show_front(front: Sequence[Prediction], *, taken: int, console: Console) -> None:
    """Print the Pareto front of time and price; `taken` is the index of the chosen plan."""
    rows = []
    for index, prediction in enumerate(front):
        plan = prediction.plan
        rows.append(
            [
                str(index + 1),
                in_seconds(prediction.time.total),
                f"{prediction.samples_per_second:.4g}",
                *_prices(prediction),
                degrees(plan),
                str(plan.microbatch_size),
                str(len(prediction.uses)),
                "this one" if index == taken else "",
            ]
        )
    header = ["plan", "step", "samples/s", "price/step", "price/million samples"]
    header += ["degrees", "micro-batch", "devices", ""]
    title = "fastest to cheapest: no plan is both faster and cheaper than one of these"
    print_table(console, header, rows, title=title)
    print_line(console, "")


def show_change(
    change: ReplanResult, *, running: Prediction | str, num_steps: int, console: Console
) -> None:
    """Print the re-planning decision; `running` is its prediction, or why it cannot continue."""
    chosen = change.planned.best
    if isinstance(running, str):
        now, saved = f"cannot continue: {running}", 0.0
    else:
        now = f"{in_seconds(running.time.total)} a step on this cluster"
        saved = running.time.total - chosen.time.total
    lines = [("running", now), ("decision", change.why)]
    num_kept = len({use.device for use in chosen.uses} - set(change.moved))
    if change.moved:
        lines.append(("moves", f"{_devices(change.moved)} with new layers; {num_kept} as before"))
    else:
        lines.append(("moves", "nothing: every device keeps its layers"))
    if change.from_checkpoint:
        lost = _ranges(map(str, change.from_checkpoint))
        lines.append(("lost", f"layers {lost} are on no device: load them from a checkpoint"))
    if not change.stays:
        takes = f"{in_seconds(change.migration)}, then {in_seconds(chosen.time.total)} a step"
        if saved > 0:
            takes += f"; pays off after {change.migration / saved:,.0f} of {num_steps:,} steps"
        lines.append(("migration", takes))
    for name, shown in lines:
        print_line(console, f"{name:<11}{shown}")
    print_line(console, "")


def degrees(plan: Plan) -> str:
    """Format the degrees of parallelism, as in `8 stages x 1 pipeline`."""
    return f"{_count(plan.num_stages, 'stage')} x {_count(plan.num_pipelines, 'pipeline')}"


def in_seconds(time: Seconds) -> str:
    """Format a time in seconds, which are easy to compare; below 1 or from 1000 in other units."""
    return f"{time:.4g}s" if 1 <= time < 1000 else text(time, Seconds)


def _show_devices(prediction: Prediction, console: Console) -> None:
    step = prediction.time.total
    rows = [
        [
            str(use.pipeline),
            _range(use.stages),
            use.device,
            use.region,
            _range(use.layers),
            _memory(use),
            _busy(use, step),
        ]
        for use in prediction.uses
    ]
    header = ["pipeline", "stage", "device", "region", "layers", "memory", "busy in a step"]
    print_table(console, header, rows)


def _show_groups(prediction: Prediction, console: Console) -> None:
    by_stage = groupby(sorted(prediction.uses, key=_stage_and_region), _stage_and_region)
    by_pipeline = groupby(prediction.uses, lambda use: (use.pipeline, use.region))
    stages, neighbours = ([list(uses) for _, uses in rows] for rows in (by_stage, by_pipeline))
    rows = [
        [
            _ranges(dict.fromkeys(f"{use.pipeline}" for use in uses)),
            _range(range(uses[0].stages.start, uses[-1].stages.stop)),
            _range(range(uses[0].layers.start, uses[-1].layers.stop)),
            uses[0].region,
            f"{len(uses)}: {_within(uses)}",
            _memory(max(uses, key=_fullness)),
            _busy(max(uses, key=lambda use: use.busy), prediction.time.total),
        ]
        for uses in min(stages, neighbours, key=len)
    ]
    header = ["pipeline", "stage", "layers", "region", "devices"]
    print_table(console, [*header, "memory, at most", "busy, at most"], rows)


def _stage_and_region(use: DeviceUse) -> tuple[object, ...]:
    return use.stages.start, use.stages.stop, use.region


def _fullness(use: DeviceUse) -> tuple[float, Bytes]:
    return (use.memory / use.limit if use.limit else 0.0), use.memory


def _show_pipelines(prediction: Prediction, console: Console) -> None:
    """Print the pipelines; equal ones share a row."""
    regions = {use.device: use.region for use in prediction.uses}
    equal: dict[tuple[str, ...], list[str]] = {}
    for number, pipeline in enumerate(prediction.plan.pipelines):
        key = str(pipeline.num_microbatches), pipeline.schedule, _route(pipeline, regions)
        equal.setdefault(key, []).append(str(number))
    rows = [[_ranges(numbers), *key] for key, numbers in equal.items()]
    print_table(console, ["pipeline", "micro-batches", "schedule", "through"], rows)


def _expected(prediction: Prediction, planned: PlanResult) -> Iterable[tuple[str, str]]:
    step, batch = prediction.time.total, prediction.plan.batch
    rate = f"{prediction.samples_per_second:.4g} samples/s"
    yield "step", f"{in_seconds(step)} for {batch:,} samples: {rate}"
    largest = [part for part in prediction.parts if part.takes > 0][:_NUM_PARTS]
    for number, part in enumerate(largest):
        yield ("" if number else "of it"), f"{_percent(part.takes / step):>5} {part.name}"
    saved = max(0.0, 1 - planned.bound / step) if step else 0.0
    least = in_seconds(planned.bound)
    yield "bound", f"no plan is faster than {least}; at most {_percent(saved)} of it could be saved"
    if prediction.price is not None:
        a_step, a_million = _prices(prediction)
        yield "price", f"{a_step} per step, {a_million} per million samples"
        if planned.price_bound:
            yield "", f"no plan's step is cheaper than {_money(planned.price_bound)}"
    if recomputing := [
        str(stage) for stage, is_on in enumerate(prediction.plan.recompute) if is_on
    ]:
        noun = "stage" if len(recomputing) == 1 else "stages"
        yield "recompute", f"activations of {noun} {_ranges(recomputing)}, in each backward"
    if prediction.plan.left_out:
        yield "left out", _devices(prediction.plan.left_out)


def _prices(prediction: Prediction) -> tuple[str, str]:
    """Return the prices of a step and of a million samples."""
    price, batch = prediction.price, prediction.plan.batch
    assert batch, "predict refuses a plan without a batch size"
    return ("-", "-") if price is None else (_money(price), _money(price / batch * _MILLION))


def _money(price: float) -> str:
    return f"{price:.4g}" if price < 1000 else f"{price:,.0f}"


def _memory(use: DeviceUse) -> str:
    return f"{_size(use.memory)} / {'-' if use.limit is None else _size(use.limit)}"


def _size(size: Bytes) -> str:
    return f"{size / 2**20:.0f}MiB" if size < 2**30 else f"{size / 2**30:.1f}GiB"


def _busy(use: DeviceUse, step: Seconds) -> str:
    return f"{in_seconds(use.busy)}, {_percent(use.busy / step if step else 0.0)}"


def _percent(share: float) -> str:
    return "<1 %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _devices(names: Sequence[str]) -> str:
    more = "" if len(names) <= MAX_NAMES else f" ... ({len(names)} in all)"
    return f"{_count(len(names), 'device')}: {', '.join(names[:MAX_NAMES])}{more}"


def _range(numbers: range) -> str:
    return str(numbers.start) if len(numbers) == 1 else f"{numbers.start}-{numbers.stop - 1}"


def _ranges(numbers: Iterable[str]) -> str:
    """Format numbers in their given order, as in `0-3, 7`."""
    runs: list[range] = []
    for number in map(int, numbers):
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return ", ".join(map(_range, runs))


def _within(uses: Sequence[DeviceUse]) -> str:
    """Format the devices of a region, which are mostly numbered: Oregon/0 to Oregon/3 are 0-3."""
    names = [use.device for use in uses]
    numbers = [name.removeprefix(f"{uses[0].region}/") for name in names]
    if all(number.isascii() and number.isdigit() for number in numbers):
        return _ranges(sorted(numbers, key=int))
    return ", ".join(names)


def _route(pipeline: PipelinePlan, regions: dict[str, str]) -> str:
    """Format the regions of a pipeline's devices, from the first stage to the last."""
    runs = groupby(regions[part.device] for part in pipeline.parts)
    counted = [(region, len(list(devices))) for region, devices in runs]
    return " > ".join(name if count == 1 else f"{name} x{count}" for name, count in counted)

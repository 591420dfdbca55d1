"""The Chrome trace contains all events of a run's log, in a form that viewers can draw."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.events import Event, Value, read_run, worker_log
from polyrhythm.observe.trace import chrome_trace, write_trace
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.types import Worker

Drawn = dict[str, Any]  # an object of traceEvents, as a viewer reads it
W00, W10 = Worker(0, 0), Worker(1, 0)


def event(
    kind: str,
    at: float,
    lasts: float | None = None,
    worker: Worker | None = None,
    name: str | None = None,
    step: int = 0,
    **values: Value,
) -> Event:
    """Return an event; times are in milliseconds."""
    return Event(
        kind=kind,
        time=1_800_000_000.0 + at / 1000,
        duration=None if lasts is None else lasts / 1000,
        worker=worker,
        name=name,
        step=step,
        values=values,
    )


def write_run(run: Path, events: Iterable[Event]) -> Path:
    by_worker: dict[Worker | None, list[Event]] = defaultdict(list, {None: []})
    for each in events:
        by_worker[each.worker].append(each)
    for worker, some in by_worker.items():
        path = run / "workers" / "nobody.jsonl" if worker is None else worker_log(run, worker)
        with EventLog(path, worker) as log:
            for each in some:
                log.append(each)
    return run


class Trace:
    """A run's trace, read back from its file."""

    def __init__(self, run: Path) -> None:
        file = run.parent / f"{run.name}.json"
        write_trace(chrome_trace(read_run(run)), file)
        self.all: list[Drawn] = json.loads(file.read_text())["traceEvents"]
        self.slices, self.moments = self.of("X"), self.of("i")
        self.workers = {e["pid"]: e["args"]["name"] for e in self.of("M", "process_name")}
        self.rows = {e["tid"]: e["args"]["name"] for e in self.of("M", "thread_name")}

    def of(self, phase: str, name: str | None = None) -> list[Drawn]:
        return [e for e in self.all if e["ph"] == phase and name in (None, e["name"])]

    def check_rows(self) -> None:
        """Check that slices of a row nest or are disjoint, and that outer slices come first."""
        around: dict[int, list[Drawn]] = defaultdict(list)
        for part in self.slices:
            stack = around[part["tid"]]
            assert not stack or stack[-1]["ts"] <= part["ts"], "in order of time"
            while stack and end(stack[-1]) <= part["ts"]:
                stack.pop()
            assert not stack or end(part) <= end(stack[-1]), (stack[-1], part)
            assert not stack or part["cat"] != "transfer", "transfers do not nest"
            stack.append(part)

    def arrows(self) -> Iterator[tuple[Drawn, Drawn]]:
        """Yield the two slices that each arrow connects: the innermost ones at its ends."""
        starts = {e["id"]: e for e in self.of("s")}
        stops = {e["id"]: e for e in self.of("f")}
        assert starts.keys() == stops.keys()
        assert 2 * len(starts) == len(self.of("s") + self.of("f"))
        for number, start in starts.items():
            assert start["ts"] <= stops[number]["ts"]
            assert stops[number]["bp"] == "e"
            yield self.innermost(start), self.innermost(stops[number])

    def innermost(self, at: Drawn) -> Drawn:
        row = [e for e in self.slices if (e["pid"], e["tid"]) == (at["pid"], at["tid"])]
        return [e for e in row if e["ts"] <= at["ts"] < max(end(e), e["ts"] + 1)][-1]


def end(part: Drawn) -> int:
    return int(part["ts"] + part["dur"])


def pipelines(*, stages: int, count: int, steps: int, microbatches: int) -> list[Event]:
    """Return events of all forwards, then all backwards, 4 ms each; transfers take 1 ms."""
    events = [event("run", -9, worker=W00, name="demo")]
    for pipeline, step, stage in product(range(count), range(steps), range(stages)):
        worker, begin = Worker(stage, pipeline), 1000.0 * step
        for op, m in product("FB", range(microbatches)):
            name = f"{op}{m}"
            depth = stage if op == "F" else stages - 1 - stage
            at = begin + 10 * m + 5 * depth + (op == "B") * 10 * (microbatches + stages)
            peer = str(worker._replace(stage=stage + (-1 if op == "F" else 1)))
            wait = 2 if depth else 0
            waited: dict[str, Value] = {"wait": wait / 1000, "waited_for": peer}
            events.append(event("action", at - wait, 4 + wait, worker, name, step, **waited))
            if depth:
                events.append(event("transfer", at - 1, 1, worker, name, step, peer=peer, bytes=9))
        events.append(event("sync", begin + 900, 7, worker, "all_reduce", step))
        events.append(event("step", begin, 910, worker, step=step, loss=2.0))
    return events


EIGHT = pipelines(stages=4, count=2, steps=2, microbatches=3)  # workers
workers_s = st.builds(Worker, st.integers(0, 2), st.integers(0, 1))
events_s = st.builds(
    lambda peer, **about: event(**about, peer=str(peer)),
    kind=st.sampled_from(["action", "transfer", "sync", "step", "plan", "fire drill"]),
    at=st.integers(0, 60),
    lasts=st.none() | st.integers(0, 30),
    worker=st.none() | workers_s,
    name=st.sampled_from(["F0", "F1", "B0", "B1", "x", None]),
    wait=st.sampled_from([-1.0, 0.0, 0.004, 1.0, "nan"]),
    peer=workers_s,
)


@given(st.lists(events_s, max_size=40))
def test_every_event_of_any_log_is_drawn(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event]
) -> None:
    trace = Trace(write_run(tmp_path_factory.mktemp("run"), events))
    trace.check_rows()
    begin = min((e.time for e in events), default=0.0)
    ends = [end(part) for part in trace.slices if part["cat"] != "wait"]
    ends += [moment["ts"] for moment in trace.moments]
    expected = [round(1e6 * (e.time - begin + (e.duration or 0.0))) for e in events]
    assert sorted(ends) == sorted(expected)
    lasted = sum(round(1e6 * (e.duration or 0.0)) for e in events)
    assert sum(part["dur"] for part in trace.slices) == lasted
    for maker, received in trace.arrows():
        assert received["cat"] == "transfer"
        assert maker["cat"] in ("forward", "backward", "action")


def test_each_action_is_drawn_once_as_its_wait_and_compute(tmp_path: Path) -> None:
    trace = Trace(write_run(tmp_path / "run", EIGHT))
    parts = defaultdict(list)
    for part in trace.slices:
        if part["cat"] in ("forward", "backward", "wait"):
            name = part["name"].removeprefix("wait for ")[:2]
            parts[trace.workers[part["pid"]], part["args"]["step"], name].append(part)
    actions = {(str(e.worker), e.step, e.name): e for e in EIGHT if e.kind == "action"}
    assert parts.keys() == actions.keys()
    begin = min(e.time for e in EIGHT)
    for (_, _, name), action in actions.items():
        first, *more = parts[str(action.worker), action.step, name]
        compute = more[0] if more else first
        assert compute["cat"] == ("forward" if str(name)[0] == "F" else "backward")
        assert len(more) == (action.values["wait"] > 0)  # type: ignore[operator]
        if more:
            assert first["name"] == f"wait for {name} from {action.values['waited_for']}"
            assert (first["cat"], first["dur"], end(first)) == ("wait", 2000, compute["ts"])
        assert first["ts"] == round(1e6 * (action.time - begin))
        assert end(compute) == round(1e6 * (action.time + (action.duration or 0.0) - begin))


def test_actions_and_syncs_lie_in_their_step_on_one_row(tmp_path: Path) -> None:
    short = [event(kind, 9000, 4, W00, "F0", step=9) for kind in ("action", "step")]
    trace = Trace(write_run(tmp_path / "run", [*EIGHT, *short]))
    trace.check_rows()
    assert set(trace.rows.values()) == {"events", "work", "transfers"}
    steps = {(e["tid"], e["args"]["step"]): e for e in trace.slices if e["cat"] == "step"}
    for part in trace.slices:
        if part["cat"] != "transfer":
            around = steps[part["tid"], part["args"]["step"]]
            assert around["ts"] <= part["ts"] <= end(part) <= end(around)
            assert trace.slices.index(around) <= trace.slices.index(part)


def test_each_transfer_has_an_arrow_from_its_senders_action(tmp_path: Path) -> None:
    trace = Trace(write_run(tmp_path / "run", EIGHT))
    found = set()
    for maker, received in trace.arrows():
        assert received["name"] == f"{maker['name']} from {trace.workers[maker['pid']]}"
        assert trace.rows[received["tid"]] == "transfers"
        assert maker["args"]["step"] == received["args"]["step"]
        found.add((trace.workers[received["pid"]], received["args"]["step"], maker["name"]))
    assert found == {(str(e.worker), e.step, e.name) for e in EIGHT if e.kind == "transfer"}


@pytest.mark.parametrize(("ahead", "num_arrows"), [(0, 1), (4, 1), (8, 1), (10, 0), (-500, 1)])
def test_arrows_never_go_back_in_time_with_skewed_clocks(
    tmp_path: Path, ahead: int, num_arrows: int
) -> None:
    made = event("action", ahead - 2, 6, W00, "F0", wait=0.002)
    received = event("transfer", 4, 5, W10, "F0", peer="s0p0")
    trace = Trace(write_run(tmp_path / "run", [made, received]))
    assert len(list(trace.arrows())) == num_arrows  # `arrows` checks their direction


def test_repeated_step_has_its_arrow_from_the_last_earlier_action(tmp_path: Path) -> None:
    events = [event("action", at, 4, W00, "F0", wait=0.0) for at in (0, 100, 200)]
    events.append(event("transfer", 104, 5, W10, "F0", peer="s0p0"))
    [(maker, _)] = Trace(write_run(tmp_path / "run", events)).arrows()
    assert maker["ts"] == 100_000


def test_concurrent_transfers_get_separate_rows(tmp_path: Path) -> None:
    events = [event("transfer", at, lasts, W10, "F0") for at, lasts in ((0, 9), (3, 2), (9, 1))]
    trace = Trace(write_run(tmp_path / "run", events))
    shown = [(trace.rows[e["tid"]], e["ts"]) for e in trace.slices]
    assert shown == [("transfers", 0), ("transfers", 9000), ("transfers 2", 3000)]


def test_workers_are_sorted_by_pipeline_and_stage_and_rows_are_unique(tmp_path: Path) -> None:
    trace = Trace(write_run(tmp_path / "run", EIGHT))
    indices = {e["pid"]: e["args"]["sort_index"] for e in trace.of("M", "process_sort_index")}
    in_order = [trace.workers[pid] for pid in sorted(indices, key=indices.__getitem__)]
    assert in_order == [f"s{stage}p{pipeline}" for pipeline in range(2) for stage in range(4)]
    assert len(trace.rows) == len(trace.of("M", "thread_name"))
    assert not trace.rows.keys() & trace.workers.keys()


@pytest.mark.long
def test_long_run_is_traced_quickly(tmp_path: Path) -> None:
    events = pipelines(stages=4, count=2, steps=64, microbatches=28)
    assert len(events) > 50_000
    trace = chrome_trace(events)
    write_trace(trace, tmp_path / "long.json")
    assert sum(e.ph == "f" for e in trace) == sum(e.kind == "transfer" for e in events)

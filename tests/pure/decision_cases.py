"""A scheduler's decision log and workers' event logs, for tests of reports and replay."""

from pathlib import Path

from polyrhythm.events import worker_log
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.sync.decision_log import LOG_NAME, DecisionLog
from polyrhythm.sync.protocol import Dead, Done, Event, Join, Leave, Ready
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Worker

WORKERS = [Worker(0, pipeline) for pipeline in range(4)]
SETUP = Setup(
    policy="partial_reduce", num_stages=1, num_pipelines=4, options={"group_size": 2}, first_gid=7
)
# Group 7 of the first two workers commits; group 8 of the others aborts when the last one dies.
EVENTS: list[Event] = [
    *(Join(worker, "node", 0, 1, 100.0 + worker.pipeline) for worker in WORKERS),
    *(Ready(worker, 1, 1, 110.0) for worker in WORKERS),
    Done(WORKERS[0], 7, True, 1, 111.0),
    Done(WORKERS[1], 7, True, 1, 111.0),
    Ready(WORKERS[0], 1, 1, 112.0),  # a duplicate: the worker missed the reply, which is resent
    Dead(WORKERS[3], 1, 112.34),
    Dead(WORKERS[3], 1, 112.5),  # a duplicate
    Leave(WORKERS[2], 1, 113.0),
    Leave(WORKERS[0], 1, 114.0),
    Join(WORKERS[1], "node", 0, 2, 115.0),  # a new incarnation
    Leave(WORKERS[1], 1, 116.0),  # of its earlier incarnation
]


def decide(folder: Path, events: list[Event] = EVENTS) -> Path:
    scheduler = SETUP.scheduler()
    log = DecisionLog(folder / LOG_NAME, SETUP, scheduler)
    for event in events:
        log.add(event, scheduler.step(event))
    log.close()
    return folder / LOG_NAME


def write_run(run: Path) -> Path:
    """Write logs of workers 0 to 2: two groups, and three averages that lost worker 3 or 1."""
    groups = {7: "s0p0 s0p1", 8: "s0p0 s0p1 s0p2"}
    for worker in WORKERS[:3]:
        with EventLog(worker_log(run, worker), worker) as log:
            log.write("step", start=log.now(), step=0)
            for gid, members in groups.items():
                if str(worker) in members:
                    values = {"members": members, "bytes": 80}
                    log.write("average", start=log.now(), name=str(gid), why="full", values=values)
            if worker.pipeline != 1:
                why = "lost s0p3 during averaging after 1.0 s: Connection closed by peer"
                log.write("average_failed", name="9", why=why)
            if worker.pipeline == 2:
                log.write("average_failed", name="10", why="lost s0p1 during connecting after 1 s")
    return run

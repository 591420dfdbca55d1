"""Links that are new or broken: the first average of a group, and training with a blackholed link.

Processes on hosts of the lab. `cold_connect`: an average of members that have never exchanged a
message, over one when they are connected. `bad_link`: the packets between two of the workers are
dropped; the steps of all workers in that time over those in an equal time before it.
`bad_link_exact_s`: the longest time between two steps of a worker then, where all average.
"""

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.average.worker import FIRST_PAIRS, PAIRS, AverageRow, AverageSetting
from benchmarks.average.worker import work as average
from benchmarks.harness.network import uniform_cluster
from benchmarks.harness.pool import PoolWorker, WorkerPool
from benchmarks.harness.report import Bar, median_of
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.lab.commands import SwitchReport
from polyrhythm.lab.lab import Lab
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.sync.modes import SyncMode
from polyrhythm.types import Bytes, Seconds

_WINDOW: Seconds = 100.0  # in which the link is blackholed
BARS = (
    Bar("cold_connect", "<=", 4.0, "first average of 16 members, 2 ms latency / when connected"),
    Bar(
        "bad_link",
        ">=",
        0.95,
        f"16 workers, `age`: steps in {_WINDOW:g} s with one blackholed link / without",
    ),
    Bar("bad_link_exact_s", "<=", 30.0, "`all_reduce`: seconds until it goes on without the link"),
)
_NUM_WORKERS = 16
_LATENCY: Seconds = 0.002  # one way
_BANDWIDTH = 125e6  # of each host, in bytes per second
_BUFFER: Bytes = 400_000
_CUT = ("w5", "w9")  # neither hosts the coordinator
_STEP: tuple[Seconds, Seconds] = 0.05, 0.15  # of compute, at random
_TIMEOUT: Seconds = 200.0
_Found = list[tuple[float, Seconds]]  # by worker: steps per second, and the longest step


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    what: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    ratios: dict[str, float]  # by bar
    rows: list[LinkRow]  # which they follow from
    troubles: list[str]  # why they cannot be trusted


def measure_links(*, quick: bool) -> MeasuredLinks:
    """Measure all bars, for seconds each if `quick`."""
    troubles = list[str]()
    first, connected = _first_average(1 if quick else 11, troubles)
    window: Seconds = 1.0 if quick else _WINDOW
    before, after = _training("age", 0.5 if quick else 10.0, (window, window), troubles)
    _, exact = _training("all_reduce", 0.5, (1.0, 1.0 if quick else 40.0), troubles)
    speeds = [sum(speed for speed, _ in found) for found in (before, after)]
    gap = max(gap for _, gap in exact)
    ratios = {
        "cold_connect": first / connected,
        "bad_link": speeds[1] / speeds[0],
        "bad_link_exact_s": gap,
    }
    rows = [
        LinkRow(what=f"an average of {_NUM_WORKERS} members, ms", value=1e3 * connected),
        LinkRow(what="the same when they have not met, ms", value=1e3 * first),
        LinkRow(what=f"`age`: steps per second of {_NUM_WORKERS} workers", value=speeds[0]),
        LinkRow(what="the same with one blackholed link", value=speeds[1]),
        LinkRow(what="`all_reduce`: longest step with that link, s", value=gap),
    ]
    return MeasuredLinks(ratios=ratios, rows=rows, troubles=troubles)


def _cluster() -> Lab:
    names = (f"w{rank}" for rank in range(_NUM_WORKERS))
    return Lab(uniform_cluster(names, _LATENCY, _BANDWIDTH))


def _first_average(num_rounds: int, troubles: list[str]) -> tuple[Seconds, Seconds]:
    """Return how long the first average of a group takes, and one when all are connected."""
    setting = AverageSetting(
        network="region",
        num_workers=_NUM_WORKERS,
        group_sizes=(_NUM_WORKERS,),
        buffer=_BUFFER,
        num_rounds=num_rounds,
        methods=(PAIRS, FIRST_PAIRS),
    )
    with _cluster() as lab, WorkerPool(lab, average, setting, timeout=_TIMEOUT) as pool:
        lab.report(reset=True)
        rows: list[AverageRow] = pool.gather("averaging")[0]
        troubles += troubles_of("a first average", lab.report())
    first, connected = (median_of(rows, "seconds", method=m) for m in (FIRST_PAIRS, PAIRS))
    return first, connected


def troubles_of(what: str, report: SwitchReport, cut: tuple[int, int] | None = None) -> list[str]:
    """Return why a measurement cannot be trusted; `cut`: the hosts of the blackholed link."""
    found = []
    if report.switch_timing.trouble is not None:
        found.append(f"{what}: {report.switch_timing.trouble}")
    pairs = [
        pair for pair in report.pairs if cut is not None and {pair.source, pair.target} == {*cut}
    ]
    if cut is not None and not any(pair.drops for pair in pairs):
        found.append(f"{what}: the blackholed link has dropped no packet: nobody used it")
    return found


def _training(
    policy: str, warm_up: Seconds, durations: tuple[Seconds, Seconds], troubles: list[str]
) -> tuple[_Found, _Found]:
    """Train without and with a blackholed link, for some time each."""
    source, target = _CUT
    without, blackholed = durations
    cut = LinkChange(at=0.0, source=source, target=target, up=False)
    restored = LinkChange(at=blackholed, source=source, target=target, up=True)
    with (
        _cluster() as lab,
        WorkerPool(lab, _train, policy, timeout=_TIMEOUT, serves_orders=True) as pool,
    ):
        pool.call("train", warm_up)
        lab.report(reset=True)
        before = pool.call("train", without)
        troubles += troubles_of(f"`{policy}` without a blackholed link", lab.report(reset=True))
        after = pool.call("train", blackholed, links=(cut, restored))
        hosts = lab.hosts.index(source), lab.hosts.index(target)
        troubles += troubles_of(f"`{policy}` with a blackholed link", lab.report(), hosts)
        pool.call("end")
    return before, after


def _train(worker: PoolWorker, policy: str) -> None:
    worker.keep_time()
    with worker.process_group():
        torch.manual_seed(0)
        model = nn.Linear(100, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with GroupSync(model, optimizer, policy, timeout=worker.timeout) as sync:
            is_exact = SyncMode.named(policy).exact
            training = _Training(sync, model, optimizer, random.Random(worker.rank), is_exact)
            worker.serve(training)


@dataclass(slots=True)
class _Training:
    sync: GroupSync
    model: nn.Module
    optimizer: torch.optim.Optimizer
    random: random.Random
    is_exact: bool

    def train(self, duration: Seconds) -> tuple[float, Seconds]:
        """Train for some time; return the number of steps per second, and the longest step.

        Where all average, all make the same number of steps, which would take that time.
        """
        start, num_steps, longest = time.monotonic(), 0, 0.0
        limit = duration / _STEP[1] if self.is_exact else math.inf
        while (now := time.monotonic()) < start + duration or self.is_exact:
            if num_steps >= limit:
                break
            self.optimizer.zero_grad()
            self.model(torch.ones(100)).square().mean().backward()
            time.sleep(max(0.0, now + self.random.uniform(*_STEP) - time.monotonic()))
            self.optimizer.step()
            self.sync.step()
            num_steps += 1
            longest = max(longest, time.monotonic() - now)
        return num_steps / (time.monotonic() - start), longest

    def end(self) -> Mapping[str, int]:
        """Average all workers: this needs the link, or a way around it."""
        self.sync.average_all()
        return {}

"""Carry out a job in the lab: a process on the host of every device, for a few steps."""

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.sleeping.measured import Measured
from benchmarks.sleeping.record import MOST_STEPS, Record
from benchmarks.sleeping.worker import DEADLINE, Part, work
from benchmarks.words import word_of_each
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.errors import LabError
from polyrhythm.lab.lab import Lab
from polyrhythm.lab.meter import PACKET, SEGMENT
from polyrhythm.processes import Child, end_all
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

NUMBER: Bytes = 4  # what a tensor's element takes
# Of a message between stages, beyond the headers of its packets: what the pipeline, gloo and TCP
# send about it and about those that go the other way. Counted by the lab, for messages of 4 and 8
# KB; those of real training are a thousand times as large, and have none to speak of.
ENVELOPE: Bytes = 400
_PORT = 29500
_HEAD_START: Seconds = 0.1  # from the last word of preparation until all begin
_LOOK: Seconds = 0.05  # at the record, again and again
_QUICK_LATENCY: Seconds = 0.0002  # of the network over which connections are made
_QUICK_BANDWIDTH: BytesPerSecond = 125e6


def lab_cluster(cluster: Cluster) -> Cluster:
    """With links on which n bytes take n / bandwidth: a lab counts the headers of packets, too."""
    return replace(
        cluster,
        bandwidth=tuple(tuple(b * PACKET / SEGMENT for b in row) for row in cluster.bandwidth),
    )


def carry_out(
    lab: Lab, parts: Sequence[Part], *, num_steps: int, folder: Path, number: int
) -> Measured:
    """Until all pipelines together have ended `num_steps` times as many steps as they are.

    `parts` are in the order of ranks; `number` is not used twice in a lab.
    """
    assert num_steps * parts[0].num_pipelines < MOST_STEPS, "the record has room"
    meeting_point = f"{lab.address(parts[0].device)}:{_PORT + number}"
    record = Record(num_stages=parts[0].num_stages, num_pipelines=parts[0].num_pipelines)
    _quicken(lab)
    pipes: list[Connection] = []
    children: list[Child] = []
    try:
        for part in parts:
            ours, theirs = multiprocessing.Pipe()
            pipes.append(ours)
            output = folder / f"{number} {part.worker}.log"
            children.append(
                lab.spawn(part.device, work, part, meeting_point, theirs, record, output=output)
            )
            theirs.close()
        word_of_each(pipes, children, "preparing", DEADLINE)
        _restore(lab)
        lab.report(reset=True)
        begin = time.monotonic() + _HEAD_START
        for pipe in pipes:
            pipe.send(begin)
        _wait_for_steps(record, children, num_steps)
        switch_timing = lab.report().switch_timing
        ends = record.ends()
    finally:
        end_all(children)
        for pipe in pipes:
            pipe.close()
    since = tuple(tuple(end - begin for end in of_pipeline) for of_pipeline in ends)
    return Measured(ends=since, switch_timing=switch_timing)


def _quicken(lab: Lab) -> None:
    """Whatever the links are like: connections take many messages."""
    regions = lab.cluster.regions
    for place, a in enumerate(regions):
        for b in regions[place:]:
            lab.change(
                LinkChange(
                    at=0.0,
                    source=a,
                    target=b,
                    latency=_QUICK_LATENCY,
                    bandwidth=_QUICK_BANDWIDTH,
                )
            )


def _restore(lab: Lab) -> None:
    cluster = lab.cluster
    for row, a in enumerate(cluster.regions):
        for column, b in enumerate(cluster.regions):
            lab.change(
                LinkChange(
                    at=0.0,
                    source=a,
                    target=b,
                    latency=cluster.latency[row][column],
                    bandwidth=cluster.bandwidth[row][column],
                    one_way=True,
                )
            )


def _wait_for_steps(record: Record, children: Sequence[Child], num_steps: int) -> None:
    so_far, ends = 0, time.monotonic() + DEADLINE
    while (ended := sum(record.num_ended())) < num_steps * record.num_pipelines:
        if ended > so_far:
            so_far, ends = ended, time.monotonic() + DEADLINE
        for rank, child in enumerate(children):
            if child.status is not None:
                raise _failed(rank, child)
        if time.monotonic() >= ends:
            raise _too_slow(f"no step was over within {DEADLINE:g} s")
        time.sleep(_LOOK)


def _failed(rank: int, child: Child) -> LabError:
    return LabError(
        f"rank {rank}: {child.reason}",
        expected="it to run until the benchmark ends it",
        fix="report it, with what it says",
    )


def _too_slow(what: str) -> LabError:
    return LabError(
        what,
        expected="a word of all within it, on two idle cores",
        fix="run the benchmark while the machine has nothing else to do",
    )

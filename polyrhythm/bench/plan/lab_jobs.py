"""Carry out a plan in the lab: a process on the host of every device, for a few steps."""

import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from polyrhythm.bench.plan.lab_worker import DEADLINE, Part, work
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.errors import LabError
from polyrhythm.lab.lab import Lab
from polyrhythm.lab.meter import PACKET, SEGMENT
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.processes import Child, end_all
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

_NUMBER: Bytes = 4  # what a tensor's element takes
# Of a message between stages, beyond the headers of its packets: what the pipeline, gloo and TCP
# send about it and about those that go the other way. Counted by the lab, for messages of 4 and 8
# KB; the described ones are a thousand times as large, and have none to speak of.
_ENVELOPE: Bytes = 400
_PORT = 29500
_HEAD_START: Seconds = 0.1  # from the last word of preparation until all begin
_QUICK_LATENCY: Seconds = 0.0002  # of the network over which connections are made
_QUICK_BANDWIDTH: BytesPerSecond = 125e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    steps: tuple[Seconds, ...]  # from the end of a step to the end of the next
    trouble: str | None  # why the emulated network was no good meanwhile, if it was not


def lab_cluster(cluster: Cluster) -> Cluster:
    """With links on which n bytes take n / bandwidth: a lab counts the headers of packets, too."""
    return replace(
        cluster,
        bandwidth=tuple(tuple(b * PACKET / SEGMENT for b in row) for row in cluster.bandwidth),
    )


def parts(plan: Plan, problem: Problem, num_steps: int) -> list[Part]:
    """What each worker does, in the order of ranks."""
    assert plan.microbatch_size is not None, "the plan is complete"
    stages = problem.stages(plan.layers_per_stage, plan.microbatch_size)
    found = []
    for rank in range(plan.num_workers):
        worker = plan.worker(rank)
        pipeline, stage = plan.pipelines[worker.pipeline], stages[worker.stage]
        assert pipeline.num_microbatches is not None, "the plan is complete"
        assert len(set(pipeline.devices)) == plan.num_stages, "a device for each stage"
        speed = problem.speeds[problem.index[pipeline.devices[worker.stage]]]
        found.append(
            Part(
                worker=worker,
                num_stages=plan.num_stages,
                num_pipelines=plan.num_pipelines,
                num_microbatches=pipeline.num_microbatches,
                schedule=pipeline.schedule,
                forward=stage.forward / speed,
                backward=stage.backward / speed,
                num_activations=round((stages[0].activation_bytes - _ENVELOPE) / _NUMBER),
                num_weights=max(1, round(stage.gradient_bytes / _NUMBER)),
                num_steps=num_steps,
            )
        )
    return found


def carry_out(
    lab: Lab, plan: Plan, problem: Problem, *, num_steps: int, folder: Path, number: int
) -> Measured:
    """Steps after the first, which finds the pipelines empty; `number` is not used twice."""
    todo = parts(plan, problem, num_steps)
    hosts = [device for pipeline in plan.pipelines for device in pipeline.devices]
    meeting_point = f"{lab.address(hosts[0])}:{_PORT + number}"
    _quicken(lab)
    pipes: list[Connection] = []
    children: list[Child] = []
    try:
        for part, host in zip(todo, hosts, strict=True):
            ours, theirs = multiprocessing.Pipe()
            pipes.append(ours)
            output = folder / f"{number} {part.worker}.log"
            children.append(lab.spawn(host, work, part, meeting_point, theirs, output=output))
            theirs.close()
        _answers(pipes, children, "preparing", DEADLINE)
        _restore(lab)
        lab.report(reset=True)
        begin = time.monotonic() + _HEAD_START
        for pipe in pipes:
            pipe.send(begin)
        ends = _answers(pipes, children, "running steps", num_steps * DEADLINE)
        trouble = lab.report().punctuality.trouble
    finally:
        end_all(children)
        for pipe in pipes:
            pipe.close()
    over = [max(of_step) for of_step in zip(*ends, strict=True)]
    return Measured(steps=tuple(b - a for a, b in pairwise(over)), trouble=trouble)


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


def _answers(
    pipes: Sequence[Connection], children: Sequence[Child], action: str, patience: Seconds
) -> list[Any]:
    """One word of each worker, in the order of ranks."""
    ends = time.monotonic() + patience
    answers: dict[int, Any] = {}
    while missing := [rank for rank in range(len(pipes)) if rank not in answers]:
        if time.monotonic() >= ends:
            raise LabError(
                f"{action} took more than {patience:g} s; no word from ranks {missing}",
                expected="a word of all within it, on two idle cores",
                fix="run the benchmark while the machine has nothing else to do",
            )
        for pipe in multiprocessing.connection.wait([pipes[rank] for rank in missing], timeout=1.0):
            assert isinstance(pipe, Connection), "they were given"
            rank = pipes.index(pipe)
            try:
                answers[rank] = pipe.recv()
            except EOFError:
                children[rank].wait(2.0)
                raise LabError(
                    f"rank {rank}, {action}: {children[rank].reason}",
                    expected="it to run until the benchmark ends",
                    fix="report it, with what it says",
                ) from None
    return [answers[rank] for rank in range(len(pipes))]

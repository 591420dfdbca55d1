"""`quiet`: equal machines on a fast network, where little can be gained, and nothing may be lost.

Two stages x two pipelines on four hosts. One byte stands for as many as in the storm, and time is
real: between them is InfiniBand of 100 Gbit/s, the faster network of DeAR's experiments, on which
averages take about a tenth of a step. Both jobs are there at the same time and take turns.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.endtoend import ours, rival
from benchmarks.endtoend.crew import Crew
from benchmarks.endtoend.side import Assignment
from benchmarks.endtoend.stormy_setting import byte_scale
from benchmarks.endtoend.turns import TurnRow, ratio, take_turns
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.lab.lab import Lab
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.types import BytesPerSecond, Seconds

TORCH, OURS = "torch", "ours"
_STAGES, _PIPELINES = 2, 2
_PORT = 29500
_PATIENCE: Seconds = 60.0
_LATENCY: Seconds = 0.0002  # as little as a lab can do
_INFINIBAND: BytesPerSecond = 100e9 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    num_layers: int
    num_microbatches: int  # of a pipeline
    forward: Seconds  # of a layer
    num_turns: int
    num_steps: int  # of a turn


FULL = Size(num_layers=24, num_microbatches=8, forward=0.004, num_turns=4, num_steps=4)
QUICK = Size(num_layers=4, num_microbatches=4, forward=0.001, num_turns=2, num_steps=2)


def quiet(*, quick: bool, say: Callable[[str], None]) -> tuple[float, list[TurnRow]]:
    """Steps per second of ours over torch's, and all turns."""
    size = QUICK if quick else FULL
    names = tuple(f"host{number}" for number in range(_STAGES * _PIPELINES))
    told = Assignment(
        plan=_plan(size, names),
        num_steps=size.num_turns * size.num_steps,
        forward=size.forward,
        backward=3 * size.forward,
        num_held_out=0,
        timeout=_PATIENCE,
        turn=size.num_steps,
    )
    say("quiet: two jobs are started")
    with tempfile.TemporaryDirectory() as folder, Lab(_cluster(names)) as lab, ExitStack() as stack:
        crews = {
            side: stack.enter_context(
                Crew(lab, work, told, output=Path(folder), port=_PORT + place)
            )
            for place, (side, work) in enumerate(((TORCH, rival.work), (OURS, ours.work)))
        }
        rows = take_turns(
            "quiet",
            crews,
            num_turns=size.num_turns,
            num_steps=size.num_steps,
            patience=_PATIENCE,
            say=say,
        )
    return ratio(rows, TORCH, OURS), rows


def _plan(size: Size, names: tuple[str, ...]) -> Plan:
    return Plan(
        layers_per_stage=(size.num_layers // _STAGES,) * _STAGES,
        pipelines=tuple(
            PipelinePlan(
                devices=names[first : first + _STAGES], num_microbatches=size.num_microbatches
            )
            for first in range(0, len(names), _STAGES)
        ),
        microbatch_size=1,
    )


def _cluster(names: tuple[str, ...]) -> Cluster:
    return Cluster(
        name="quiet",
        devices=tuple(Device(name=name, region="here") for name in names),
        regions=("here",),
        latency=((_LATENCY,),),
        bandwidth=((_INFINIBAND * byte_scale(),),),
    )

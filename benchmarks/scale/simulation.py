"""One simulation in a process of its own: print its time and peak memory as JSON.

python -m benchmarks.scale.simulation NUM_STAGES NUM_PIPELINES NUM_MICROBATCHES NUM_STEPS [RUN]
"""

import json
import resource
import sys
import time
from pathlib import Path

from polyrhythm.cost.step import StageWork
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import Scenario
from polyrhythm.schedule.builders import build
from polyrhythm.simulate.job import SimulatedJob, replicas
from polyrhythm.simulate.simulator import simulate
from polyrhythm.sync.setup import Setup


def setting_b(num_stages: int, num_pipelines: int, num_microbatches: int) -> SimulatedJob:
    """Return SDPipe's setting B: one action in ten is late by three times a micro-batch."""
    names = [f"d{number}" for number in range(num_stages * num_pipelines)]
    stage = StageWork(forward=0.1, backward=0.2, activation_bytes=1e6, gradient_bytes=1e7)
    schedule = build("1f1b", num_stages=num_stages, num_microbatches=num_microbatches)
    return SimulatedJob(
        cluster=Cluster(
            name="equal",
            devices=tuple(Device(name=name, region="here", uplink=1e18) for name in names),
            regions=("here",),
            latency=((0.0005,),),
            bandwidth=((1.25e9,),),
        ),
        stages=(stage,) * num_stages,
        pipelines=replicas(schedule, num_pipelines),
        sync=Setup(policy="adaptive", num_stages=num_stages, num_pipelines=num_pipelines),
        scenario=Scenario.load("sdpipe_b"),
    )


def main(num_stages: int, num_pipelines: int, num_microbatches: int, num_steps: int) -> None:
    simulate(setting_b(2, 2, 2), num_steps=2)  # compiles, before the clock starts
    job = setting_b(num_stages, num_pipelines, num_microbatches)
    run = Path(sys.argv[5]) if len(sys.argv) > 5 else None
    start = time.perf_counter()
    simulated = simulate(job, num_steps=num_steps, run=run)
    figures = {
        "seconds": time.perf_counter() - start,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "actions": simulated.num_actions,
        "events": simulated.num_events,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))

"""One simulation in a process of its own: how long it takes and how much memory, as JSON.

python -m benchmarks.scale.timed NUM_STAGES NUM_PIPELINES NUM_MICROBATCHES NUM_STEPS [RUN]
"""

import json
import resource
import sys
import time
from pathlib import Path

from polyrhythm.describe.scenario import Scenario
from polyrhythm.simulate.job import SimulatedJob, equal_job
from polyrhythm.simulate.simulator import simulate


def setting_b(*, num_stages: int, num_pipelines: int, num_microbatches: int) -> SimulatedJob:
    """SDPipe's: every action is late by three times a micro-batch, one time in ten."""
    return equal_job(
        num_stages=num_stages,
        num_pipelines=num_pipelines,
        num_microbatches=num_microbatches,
        forward=0.1,
        backward=0.2,
        activation_bytes=1e6,
        gradient_bytes=1e7,
        latency=0.0005,
        bandwidth=1.25e9,
        policy="adaptive",
        scenario=Scenario.load("sdpipe_b"),
    )


def main(num_stages: int, num_pipelines: int, num_microbatches: int, num_steps: int) -> None:
    # What is compiled, by the first simulation on a machine, is there before the clock starts.
    simulate(setting_b(num_stages=2, num_pipelines=2, num_microbatches=2), num_steps=2)
    job = setting_b(
        num_stages=num_stages, num_pipelines=num_pipelines, num_microbatches=num_microbatches
    )
    run = Path(sys.argv[5]) if len(sys.argv) > 5 else None
    began = time.perf_counter()
    found = simulate(job, num_steps=num_steps, run=run)
    seconds = time.perf_counter() - began
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {
                "seconds": seconds,
                "bytes": most,
                "actions": found.num_actions,
                "events": found.num_events,
                "step_time": found.step_time,
            }
        )
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))

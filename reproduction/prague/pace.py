"""How fast workers go once they have settled: the paper's runs are thousands of steps long.

Smart groups need some tens of steps until the first divisions, which find few workers idle, have
given way to divisions of all. So only the second half of a run counts.
"""

from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.simulate.simulator import simulate
from polyrhythm.types import Seconds

_NUM_STEPS = 120


def pace(job: SimulatedJob, num_steps: int = _NUM_STEPS) -> Seconds:
    """In which all workers together make as many steps as they are."""
    return settled(simulate(job, num_steps=num_steps))


def settled(simulated: SimulationResult) -> Seconds:
    """The same, of a run's second half: from a worker's first end of a step in it to its last."""
    half, rate = simulated.duration / 2, 0.0
    for ends in simulated.ends:
        late = [end for end in ends if end >= half]
        if len(late) > 1:
            rate += (len(late) - 1) / (late[-1] - late[0])
    return len(simulated.ends) / rate

"""Does `auto` follow a network that goes fast, slow and fast again?

A phase is followed if, after its last step, the schedule in use is one of the phase's best: within
two per cent of the ideal there, both simulated on the described network, and, where 1F1B is among
those, with no more memory than 1F1B.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.pipeline.networks import FAST, FULL, HOSTS, Network, ideal
from benchmarks.pipeline.stages import Stages
from benchmarks.pipeline.worker import Order
from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.cost.pipeline import length
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Seconds

PHASES = (FAST, FULL, FAST)
ALLOWED = 1.02  # of the ideal: the tuner trades as much for memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    network: str
    spec: str  # at its end
    steps: int  # after which that was in use
    followed: bool

    def __str__(self) -> str:
        word = "followed" if self.followed else "NOT followed"
        return f"phase {self.network}: {word}, {self.spec} after {self.steps} steps"


def follow(stages: Stages, forward: Seconds, num_steps: int, num_microbatches: int) -> list[Phase]:
    found = []
    for number, network in enumerate(PHASES):
        stages.set_network(network, forward)
        used = []
        for step in range(num_steps):
            order = Order(side="auto", forward=forward, anew=number == 0 and step == 0)
            used.append(stages.step(order, network=network, seed=step)[0].spec)
        found.append(_judged(network, used, forward, num_microbatches))
    return found


def _judged(
    network: Network, used: Sequence[str], forward: Seconds, num_microbatches: int
) -> Phase:
    last = used[-1]
    settled = max((i + 1 for i, spec in enumerate(used) if spec != last), default=0)
    first = ScheduleSpec("1f1b")
    longest = ALLOWED * ideal(network, forward, num_microbatches)
    is_short = _length(ScheduleSpec.parse(last), network, forward, num_microbatches) <= longest
    first_is_short = _length(first, network, forward, num_microbatches) <= longest
    is_small = not first_is_short or _held(ScheduleSpec.parse(last)) <= _held(first)
    return Phase(network=network.name, spec=last, steps=settled, followed=is_short and is_small)


def _length(
    spec: ScheduleSpec, network: Network, forward: Seconds, num_microbatches: int
) -> Seconds:
    schedule = spec.build(num_stages=len(HOSTS), num_microbatches=num_microbatches)
    return length(schedule, network.times(forward))


def _held(spec: ScheduleSpec) -> int:
    schedule = spec.build(num_stages=len(HOSTS), num_microbatches=100)
    return sum(peak_in_flight(actions) for actions in schedule)

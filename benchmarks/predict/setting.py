"""What is predicted and measured: schedules and ways to average, on three networks.

Everything is scaled so that 12 workers share two cores: compute is a sleep of tens of milliseconds,
and what is under way on a link is less than TCP sends before it hears anything.
"""

from dataclasses import dataclass

from benchmarks.sleeping.worker import Averaging
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import EVERY_DEVICE, Scenario, Slow
from polyrhythm.types import BytesPerSecond, Seconds, Worker

NUM_STAGES, NUM_MICROBATCHES = 3, 5
FORWARDS: tuple[Seconds, ...] = (0.016, 0.020, 0.016)  # of a micro-batch, by stage
BACKWARD = 2  # times a forward
NUM_ACTIVATIONS, NUM_WEIGHTS = 2048, 16384  # of a micro-batch, and of a stage
_KILOBYTE: BytesPerSecond = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What a user could choose between."""

    schedule: str
    averaging: Averaging

    @property
    def name(self) -> str:
        averaging = self.averaging
        ways = [averaging.policy, *(w for w in ("overlap", "decoupled") if getattr(averaging, w))]
        return f"{self.schedule}, {' '.join(ways)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    num_pipelines: int
    networks: tuple[Cluster, ...]
    alternatives: tuple[Alternative, ...]
    num_steps: int  # of one run
    num_left_out: int  # of them, the first ones, which find the pipelines empty
    num_repeated: int  # alternatives, the last ones, that are measured once more on each network
    profile_repeat: int
    probe_seconds: Seconds  # of a transfer, from which a bandwidth is taken
    probe_repeat: int
    spare: Seconds  # for runs that are repeated, since the emulated network was late


def device_name(worker: Worker) -> str:
    return f"d{worker.pipeline * NUM_STAGES + worker.stage}"


# Two devices are slow all the time, and all now and then, as in SDPipe's experiments.
_SLOW = {Worker(1, 1): 2.5, Worker(0, 2): 1.3}
_SLEEPS = Slow(device=EVERY_DEVICE, probability=0.02, sleep_factor=1.0)


def workers(num_pipelines: int) -> tuple[Worker, ...]:
    """In the order of ranks."""
    return tuple(Worker(s, p) for p in range(num_pipelines) for s in range(NUM_STAGES))


def scenario(num_pipelines: int) -> Scenario:
    slow = [
        Slow(device=device_name(worker), factor=factor)
        for worker, factor in _SLOW.items()
        if worker.pipeline < num_pipelines
    ]
    return Scenario(name="slow workers", slow=(*slow, _SLEEPS))


def office(num_pipelines: int) -> Cluster:
    """All near one another."""
    return Cluster(
        name="office",
        devices=tuple(
            Device(name=device_name(worker), region="here") for worker in workers(num_pipelines)
        ),
        regions=("here",),
        latency=((0.001,),),
        bandwidth=((2000 * _KILOBYTE,),),
    )


def two_sites(num_pipelines: int) -> Cluster:
    """Half of the pipelines on each: only averages go from one to the other."""
    sites = ("west", "east")
    return Cluster(
        name="two sites",
        devices=tuple(
            Device(name=device_name(worker), region=sites[2 * worker.pipeline // num_pipelines])
            for worker in workers(num_pipelines)
        ),
        regions=sites,
        latency=((0.002, 0.02), (0.02, 0.002)),
        bandwidth=(
            (1000 * _KILOBYTE, 300 * _KILOBYTE),
            (300 * _KILOBYTE, 1000 * _KILOBYTE),
        ),
    )


def world(num_pipelines: int) -> Cluster:
    """Unequal links, faster in one direction than in the other; every pipeline goes round."""
    places = ("a", "b", "c", "d")
    rates = (
        (900, 450, 300, 360),
        (330, 750, 450, 270),
        (390, 300, 1200, 450),
        (270, 390, 330, 1000),
    )
    return Cluster(
        name="world",
        devices=tuple(
            Device(name=device_name(worker), region=places[sum(worker) % len(places)])
            for worker in workers(num_pipelines)
        ),
        regions=places,
        latency=(
            (0.001, 0.008, 0.018, 0.012),
            (0.008, 0.002, 0.010, 0.015),
            (0.018, 0.010, 0.001, 0.006),
            (0.012, 0.015, 0.006, 0.002),
        ),
        bandwidth=tuple(tuple(rate * _KILOBYTE for rate in row) for row in rates),
    )


_SCHEDULES = ("1f1b", "gpipe", "bounded:5,3,1")
_ALL_REDUCE, _STATIC = Averaging(policy="all_reduce"), Averaging(policy="static")
_PARTIAL = Averaging(policy="partial_reduce", options={"group_size": 2})
_OVERLAP = Averaging(policy="adaptive", overlap=True)
# By default, windows follow the rate at which workers come: then a millisecond may decide who is in
# a group, and that how long the next window is. Two runs of the same were 8 % apart. So where
# workers wait for windows, these are fixed, and so long that few workers come close to their ends.
_WINDOW = {"window": 0.2}
_DECOUPLED = Averaging(policy="age", options=_WINDOW, decoupled=True)
_ADAPTIVE = Averaging(policy="adaptive", options=_WINDOW)
_ALTERNATIVES = (
    *(
        Alternative(schedule=schedule, averaging=averaging)
        for schedule in _SCHEDULES
        for averaging in (_ALL_REDUCE, _PARTIAL, _OVERLAP)
    ),
    *(
        Alternative(schedule="1f1b", averaging=averaging)
        for averaging in (_STATIC, _DECOUPLED, _ADAPTIVE)
    ),
)

FULL = Size(
    num_pipelines=4,
    networks=(office(4), two_sites(4), world(4)),
    alternatives=_ALTERNATIVES,
    num_steps=7,
    num_left_out=1,
    num_repeated=1,
    profile_repeat=15,
    probe_seconds=0.1,
    probe_repeat=2,
    spare=180.0,
)
QUICK = Size(
    num_pipelines=2,
    networks=(office(2),),
    alternatives=_ALTERNATIVES[:2],
    num_steps=2,
    num_left_out=1,
    num_repeated=0,
    profile_repeat=3,
    probe_seconds=0.02,
    probe_repeat=1,
    spare=0.0,
)

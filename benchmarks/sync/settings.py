"""What the synchronisation benchmark compares: sides, and the settings they are measured in."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from polyrhythm.describe.scenario import Scenario
from polyrhythm.types import BytesPerSecond, Seconds

MICROBATCHES_PER_WORKER = 16  # one sample each: what a worker computes in a step
LAST_GROUPS, MAX_AGE, STALENESS = 10, 10, 4
LATENCY: Seconds = 0.0002
BANDWIDTH: BytesPerSecond = 125e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A way to synchronise; of a grid also how its pipelines run."""

    name: str
    policy: str | None  # None: no synchronisation at all
    options: Mapping[str, object] = field(default_factory=dict)
    overlap: bool = False
    schedule: str = "1f1b"
    flush: bool = False
    num_microbatches: int = 1  # of a step, with a flush
    num_rounds: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`forward` and `backward` are one step's compute of a worker that nothing slows."""

    name: str
    scenario: Scenario
    sides: tuple[Side, ...]
    warm_up: Seconds
    measured: Seconds
    forward: Seconds = 0.1
    backward: Seconds = 0.2
    num_stages: int = 1
    num_workers: int = 16  # of all stages
    num_floats: int = 2000  # the weights of a worker
    learning_rate: float = 0.1
    num_lanes: int = 1  # sides that run at the same time, on hosts of their own
    latency: Seconds = LATENCY
    bandwidth: BytesPerSecond = BANDWIDTH

    @property
    def num_pipelines(self) -> int:
        return self.num_workers // self.num_stages

    def samples_per_step(self, side: Side) -> int:
        return MICROBATCHES_PER_WORKER * side.num_microbatches

    def seeded(self, seed: int) -> "Setting":
        return replace(self, scenario=replace(self.scenario, seed=seed))

    @property
    def length(self) -> Seconds:
        return self.warm_up + self.measured


def device_name(rank: int) -> str:
    return f"w{rank}"


_ADAPTIVE: dict[str, object] = {"last_groups": LAST_GROUPS}
_AGE: dict[str, object] = {"max_age": MAX_AGE}

ALL_REDUCE = Side(name="all_reduce", policy="all_reduce")
SMART = Side(name="smart", policy="smart")
AGE = Side(name="age", policy="age", options=_AGE)
AGE_OVERLAP = Side(name="age, overlap", policy="age", options=_AGE, overlap=True)
ADAPTIVE = Side(name="adaptive", policy="adaptive", options=_ADAPTIVE)
ADAPTIVE_OVERLAP = Side(
    name="adaptive, overlap", policy="adaptive", options=_ADAPTIVE, overlap=True
)
BALANCED = Side(name="balanced", policy="balanced")
STATIC = Side(name="static", policy="static")
PAIRWISE = Side(name="pairwise", policy="pairwise")
SSP = Side(name="ssp", policy="ssp", options={"staleness": STALENESS})
NOBODY = Side(name="none", policy=None)


def with_slack(side: Side, num_stages: int) -> Side:
    """The same side with four times 1F1B's batches in flight."""
    limits = ",".join(str(4 * (num_stages - stage)) for stage in range(num_stages))
    return replace(side, name=f"{side.name}, slack", schedule=f"bounded:{limits}")


def hetpipe(num_stages: int) -> Side:
    """A pipeline is one virtual worker: flushed inside, in waves of a mini-batch per stage."""
    return Side(
        name="hetpipe",
        policy="ssp",
        options={"staleness": num_stages},
        flush=True,
        num_microbatches=num_stages,
    )

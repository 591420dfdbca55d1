"""Plans run in the lab: ours against random ones, and layers divided by speed or equally.

GPT3-XL around the world, and a few machines of unequal speed. Time and bytes are scaled down alike,
so that ratios stay and 16 workers share two cores. Processes, pipelines, messages and averages are
real; compute is emulated. Plans that are compared take turns, and a run during which the emulated
network was late is repeated while there is time.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.harness.network import lab_cluster
from benchmarks.harness.pipeline_job import ENVELOPE, FLOAT, EmulatedWorker, JobTimes, run_job
from benchmarks.harness.report import select
from benchmarks.harness.timing import MAX_STOLEN, StolenTime
from benchmarks.plan import cases
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scale import fewer_devices, scaled_cluster
from polyrhythm.lab.lab import Lab
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.predict import Prediction, predict
from polyrhythm.plan.problem import Problem
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

PLANNED, EQUAL = "planner", "equally"
XL_LAYERS = 24
XL_GRADIENT: Bytes = cases.XL_PARAMETERS * 4  # of one layer
_UNEVEN_SPEEDS = (1.0, 1.0, 1 / 3, 1 / 3)
_UNEVEN_LAYERS = 32
_NO_LIMIT: BytesPerSecond = 1e15
_DRAWS = 8  # random placements, for each that is used
_TRIES = 3
_NUM_BETWEEN = 2  # other plans between two runs of ours

NamedPlan = tuple[str, Prediction]  # a plan and its name


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSetting:
    num_stages: int
    num_pipelines: int
    num_microbatches: int  # of a pipeline, on average
    time_scale: float  # seconds in the lab per second of the real world
    byte_scale: float
    num_random: int  # placements to compare with
    num_steps: int  # of one run; the first does not count
    uneven_forward: Seconds  # of a layer on a fast device
    uneven_microbatches: int
    uneven_rounds: int
    budget: Seconds  # after which no run is repeated


# Bytes: the longest link holds less than TCP sends before the first acknowledgement.
# Time: a step of the 16 processes takes them 3 s of two cores, and must take much longer than that.
FULL = LabSetting(
    num_stages=4,
    num_pipelines=4,
    num_microbatches=64,
    time_scale=0.4,
    byte_scale=1 / 2048,
    num_random=5,
    num_steps=3,
    uneven_forward=0.001,
    uneven_microbatches=32,
    uneven_rounds=2,
    budget=300.0,
)
QUICK = replace(
    FULL,
    num_stages=2,
    num_pipelines=2,
    num_microbatches=8,
    time_scale=0.01,
    num_random=1,
    uneven_forward=0.0001,
    uneven_microbatches=12,
    uneven_rounds=1,
    num_steps=2,
    budget=0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRow:
    """One run of one plan."""

    ratio: str  # that it counts for
    side: str
    measured: Seconds  # a step
    predicted: Seconds
    layers: tuple[int, ...]  # of each stage
    microbatches: tuple[int, ...]  # of each pipeline
    disturbed: bool

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured


def world(setting: LabSetting) -> Problem:
    """Return GPT3-XL on as many devices as workers, of all regions; in the lab's time and bytes."""
    num_workers = setting.num_stages * setting.num_pipelines
    cluster = fewer_devices(Cluster.load(cases.WORLDWIDE), num_workers)
    # A host of the lab sends to all others at once, with no limit of its own.
    devices = tuple(replace(device, uplink=_NO_LIMIT) for device in cluster.devices)
    return Problem(
        cluster=scaled_cluster(
            replace(cluster, devices=devices),
            time_scale=setting.time_scale,
            byte_scale=setting.byte_scale,
        ),
        profile=cases.equal_layers(
            "GPT3-XL in the lab",
            XL_LAYERS,
            cases.XL_FORWARD * setting.time_scale,
            round(XL_GRADIENT * setting.byte_scale),
            round(cases.XL_ACTIVATIONS * setting.byte_scale),
        ),
        job=TrainingJob(
            batch_size=setting.num_microbatches * setting.num_pipelines,
            num_stages=setting.num_stages,
            num_pipelines=setting.num_pipelines,
            microbatch_size=1,
        ),
    )


def uneven(setting: LabSetting) -> Problem:
    """Return one pipeline of equal layers on fast and slow devices next to each other."""
    return Problem(
        cluster=Cluster(
            name="uneven",
            devices=tuple(
                Device(name=f"d{number}", region="here", speed=speed)
                for number, speed in enumerate(_UNEVEN_SPEEDS)
            ),
            regions=("here",),
            latency=((0.0002,),),
            bandwidth=((12.5e6,),),
        ),
        profile=cases.equal_layers("equal layers", _UNEVEN_LAYERS, setting.uneven_forward, 4, 4096),
        job=TrainingJob(
            batch_size=setting.uneven_microbatches,
            num_stages=len(_UNEVEN_SPEEDS),
            num_pipelines=1,
            microbatch_size=1,
        ),
    )


def random_plans(problem: Problem, number: int) -> list[Prediction]:
    """Return random placements, from a lucky one to an unlucky one: so few represent all better.

    Of many that are drawn, each is the middle one of one of `number` classes of equal size.
    """
    draw = random.Random(0)
    names = list(problem.index)
    drawn = [placed(problem, draw.sample(names, len(names))) for _ in range(_DRAWS * number)]
    drawn.sort(key=lambda one: one.time.total)
    return drawn[_DRAWS // 2 :: _DRAWS]


def placed(problem: Problem, devices: Sequence[str]) -> Prediction:
    """Predict equal stages and micro-batches on these devices, with the best schedules for that."""
    job = problem.job
    assert job.num_stages, "both settings fix it"
    assert job.num_pipelines, "both settings fix it"
    num_microbatches = job.batch_size // job.num_pipelines
    plan = cases.equal_pipelines(devices, problem.num_layers, job.num_stages, num_microbatches)
    return predict(plan, problem)


def lab_rows(
    *, quick: bool, make_plan: Callable[[Problem], Plan], on_progress: Callable[[str], None]
) -> list[LabRow]:
    setting = QUICK if quick else FULL
    deadline = time.monotonic() + setting.budget
    mixed_problem, uneven_problem = world(setting), uneven(setting)
    ours = PLANNED, predict(make_plan(mixed_problem), mixed_problem)
    drawn = random_plans(mixed_problem, setting.num_random)
    others = [(f"random {number}", each) for number, each in enumerate(drawn)]
    by_speed = PLANNED, predict(make_plan(uneven_problem), uneven_problem)
    equal = EQUAL, placed(uneven_problem, list(uneven_problem.index))
    interleaved: list[NamedPlan] = []
    for first in range(0, len(others), _NUM_BETWEEN):
        interleaved += [ours, *others[first : first + _NUM_BETWEEN]]

    def measure(ratio: str, problem: Problem, plans: Sequence[NamedPlan]) -> list[LabRow]:
        rows, num_steps = [], setting.num_steps
        with Lab(lab_cluster(problem.cluster)) as lab:
            for side, prediction in plans:
                on_progress(f"{ratio}: {side}")
                for _ in range(_TRIES):
                    stolen = StolenTime()
                    job = run_job(lab, emulated_workers(prediction.plan, problem), num_steps)
                    is_trusted = job.switch_timing.trouble is None and stolen.share() <= MAX_STOLEN
                    if is_trusted or time.monotonic() >= deadline:
                        break
                rows.append(_row(ratio, side, prediction, job, num_steps))
        return rows

    rows = measure("lab_vs_random", mixed_problem, interleaved)
    return rows + measure("uneven", uneven_problem, [by_speed, equal] * setting.uneven_rounds)


def emulated_workers(plan: Plan, problem: Problem) -> list[EmulatedWorker]:
    """Return what each worker computes and sends, in rank order."""
    assert plan.microbatch_size is not None, "the plan is complete"
    stages = problem.stages(plan.layers_per_stage, plan.microbatch_size, plan.recompute)
    workers = []
    for rank in range(plan.num_workers):
        worker = plan.worker(rank)
        pipeline, stage = plan.pipelines[worker.pipeline], stages[worker.stage]
        assert pipeline.num_microbatches is not None, "the plan is complete"
        assert len(set(pipeline.devices)) == plan.num_stages, "a device for each stage"
        device = pipeline.devices[worker.stage]
        speed = problem.speeds[problem.index[device]]
        workers.append(
            EmulatedWorker(
                worker=worker,
                device=device,
                num_stages=plan.num_stages,
                num_pipelines=plan.num_pipelines,
                num_microbatches=pipeline.num_microbatches,
                schedule=pipeline.schedule,
                forward=stage.forward / speed,
                backward=stage.backward / speed,
                num_activations=round((stages[0].activation_bytes - ENVELOPE) / FLOAT),
                num_weights=max(1, round(stage.gradient_bytes / FLOAT)),
            )
        )
    return workers


def _row(ratio: str, side: str, prediction: Prediction, job: JobTimes, num_steps: int) -> LabRow:
    """Take the median of steps after the first, which finds the pipelines empty."""
    plan = prediction.plan
    ends = [max(of_step) for of_step in zip(*job.ends, strict=False)][:num_steps]
    return LabRow(
        ratio=ratio,
        side=side,
        measured=statistics.median(b - a for a, b in pairwise(ends)),
        predicted=prediction.time.total,
        layers=plan.layers_per_stage,
        microbatches=tuple(pipeline.num_microbatches or 0 for pipeline in plan.pipelines),
        disturbed=job.switch_timing.trouble is not None,
    )


def lab_ratios(rows: Sequence[LabRow]) -> tuple[dict[str, float], dict[str, float]]:
    """Return ratios and figures."""
    ours, others = _steps(rows, "lab_vs_random")
    by_speed, equal = _steps(rows, "uneven")
    step, others_step = statistics.median(ours), statistics.fmean(others)
    ratios = {
        "lab_vs_random": others_step / step,
        "lab_predicted": abs(rows[0].predicted / step - 1),
        "uneven": statistics.median(equal) / statistics.median(by_speed),
    }
    figures = {
        "lab_step_s": step,
        "lab_random_step_s": others_step,
        "lab_predicted_worst": max(row.error for row in rows),
    }
    return ratios, figures


def _steps(rows: Sequence[LabRow], ratio: str) -> tuple[list[Seconds], list[Seconds]]:
    """Return the steps of our plan, and those of the plans it is compared with."""
    of_ratio = select(rows, ratio=ratio)
    ours = [row.measured for row in of_ratio if row.side == PLANNED]
    return ours, [row.measured for row in of_ratio if row.side != PLANNED]

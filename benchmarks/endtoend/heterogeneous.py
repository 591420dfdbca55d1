"""`heterogeneous`: samples per second of the Trainer with `auto` against torch's 1F1B and DDP.

GPT3-XL on 16 machines around the world, slow at random, on bursty links. Time and bytes are those
of `bench plan` in the lab, with real layers of a small model: one byte here represents as many as a
layer of GPT3-XL has more.

The baseline has random places, the mean over a few layouts, and its best size of micro-batches,
which is found on the first of them; its processes hardly need the cores, so its runs are
concurrent. Ours is timed from its first step to the end, the search for the best sync mode
included. torch is synchronous: a single process learns from the same samples, and the first losses
of both are compared.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from statistics import fmean

from benchmarks.endtoend import workers
from benchmarks.endtoend.job import JobLog, JobPool, JobSetting
from benchmarks.harness.network import lab_cluster, make_links_fast, preemptions, restore_links
from benchmarks.harness.pipeline_job import ENVELOPE
from benchmarks.harness.pool import LocalHosts, WorkerPool, run_concurrently
from benchmarks.plan import lab as plan_lab
from benchmarks.plan.cases import equal_pipelines
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import LinkChange, Scenario
from polyrhythm.lab.lab import Lab
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.search import search_plan
from polyrhythm.types import Bytes, Seconds

_BUCKET: Bytes = 25 * 2**20  # of DDP, by default
PREEMPTED = 1 / 4  # of a link's bandwidth
_DWELL: Seconds = 2.0  # until the next draw, in the time of the real world: a sixth of our step
_LONGEST: Seconds = 1200.0  # of a run: as long do links change
_BASELINE_STEPS = 1  # of each run of torch
_NUM_CORES = 2  # that all processes share
_SINGLE_TIMEOUT: Seconds = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeterogeneousSetting:
    lab: plan_lab.LabSetting
    num_steps: int  # of the Trainer
    num_held_out: int
    baseline_sizes: tuple[int, ...]  # samples of a micro-batch, to choose from
    num_layouts: int
    timeout: Seconds  # of a step


FULL = HeterogeneousSetting(
    lab=replace(plan_lab.FULL, num_microbatches=16),
    num_steps=48,
    num_held_out=512,
    baseline_sizes=(1, 2, 4),
    num_layouts=3,
    timeout=120.0,
)
QUICK = HeterogeneousSetting(
    lab=replace(plan_lab.QUICK, num_microbatches=4, time_scale=0.02),
    num_steps=4,
    num_held_out=16,
    baseline_sizes=(1, 2),
    num_layouts=2,
    timeout=60.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeterogeneousRow:
    """One run."""

    side: str  # torch, or ours
    layout: str
    microbatch_size: int
    num_steps: int
    seconds: Seconds
    rate: float  # samples per second
    steady_rate: float  # of the second half of all samples
    load: float  # the share of two cores that its processes used
    losses: tuple[float, ...]  # of the samples of each step, at first
    disturbed: bool


BaselineRun = tuple[int, tuple[str, ...], int]  # number, layout, size of a micro-batch
Measured = tuple[dict[str, float], dict[str, float], list[HeterogeneousRow]]


def problem_of(setting: HeterogeneousSetting) -> Problem:
    """Return the planning problem in seconds and bytes of the lab, with the real layers."""
    problem = plan_lab.world(replace(setting.lab, byte_scale=workers.byte_scale()))
    sizes = workers.layer_bytes(problem.num_layers)
    layers = tuple(
        replace(layer, parameter_bytes=weights, activation_bytes=workers.ACTIVATIONS + ENVELOPE)
        for layer, weights in zip(problem.profile.layers, sizes, strict=True)
    )
    return replace(problem, profile=replace(problem.profile, layers=layers))


def random_layouts(problem: Problem, setting: HeterogeneousSetting) -> list[tuple[str, ...]]:
    """Return all devices in random orders, one per seed."""
    names, seeds = list(problem.index), range(setting.num_layouts)
    return [tuple(random.Random(seed).sample(names, len(names))) for seed in seeds]


def baseline_plan(
    layout: Sequence[str], setting: HeterogeneousSetting, microbatch_size: int
) -> Plan:
    return equal_pipelines(
        layout,
        plan_lab.XL_LAYERS,
        setting.lab.num_stages,
        setting.lab.num_microbatches // microbatch_size,
        microbatch_size=microbatch_size,
        schedule="1f1b",
    )


def bursts(cluster: Cluster, *, dwell: Seconds, until: Seconds, seed: int) -> list[LinkChange]:
    """Draw for each direction between two regions if it is preempted, again after random dwells."""
    links = {
        (a, b): (cluster.bandwidth[row][column], cluster.bandwidth[row][column] * PREEMPTED)
        for (row, a), (column, b) in permutations(enumerate(cluster.regions), 2)
    }
    return preemptions(links, dwell=dwell, until=until, seed=seed)


def heterogeneous(*, quick: bool, show: Callable[[str], None]) -> Measured:
    """Return ratios, figures and rows."""
    setting = QUICK if quick else FULL
    problem = problem_of(setting)
    cluster, dwell = lab_cluster(problem.cluster), _DWELL * setting.lab.time_scale
    links = bursts(cluster, dwell=dwell, until=_LONGEST, seed=0)
    runs = _Runs(setting, cluster, links, problem.profile.layers[0].forward, show)
    show("heterogeneous: planning")
    plan = search_plan(problem).best.plan
    layouts = random_layouts(problem, setting)
    job = runs.job(plan, setting.num_steps)
    with WorkerPool(LocalHosts(), workers.single_process, job, timeout=_SINGLE_TIMEOUT) as single:
        rows = runs.baseline([(0, layouts[0], size) for size in setting.baseline_sizes])
        best = max(rows, key=lambda row: row.rate)
        others = enumerate(layouts[1:], start=1)
        baseline = [best, *runs.baseline([(*other, best.microbatch_size) for other in others])]
        losses, expected = single.gather("training in one process")[0]
        ours, held_out = runs.trainer(job)
    baseline_rate = fmean(row.rate for row in baseline)
    ratios = {
        "heterogeneous": ours.rate / baseline_rate,
        "heterogeneous_loss": held_out / expected - 1,
    }
    figures = {
        "heterogeneous_steady": ours.steady_rate / baseline_rate,
        "heterogeneous_samples_per_s": ours.rate,
        "heterogeneous_torch_samples_per_s": baseline_rate,
        "heterogeneous_held_out": held_out,
        "heterogeneous_torch_held_out": expected,
        "heterogeneous_load": ours.load,
        "heterogeneous_torch_loss_error": max(
            abs(a - b) for row in baseline for a, b in zip(row.losses, losses, strict=False)
        ),
    }
    return ratios, figures, [*rows, *baseline[1:], ours]


@dataclass(frozen=True)
class _Runs:
    """Runs jobs, each in a lab of its own, with the same draws of slowness and links."""

    setting: HeterogeneousSetting
    cluster: Cluster
    links: list[LinkChange]
    forward: Seconds  # of a layer
    show: Callable[[str], None]

    def job(self, plan: Plan, num_steps: int) -> JobSetting:
        return JobSetting(
            plan=plan,
            num_steps=num_steps,
            forward=self.forward,
            backward=3 * self.forward,
            num_held_out=self.setting.num_held_out,
            timeout=self.setting.timeout,
            # SDPipe's setting B; sleeps are relative to the work, whatever the scale of time.
            scenario=Scenario.load("sdpipe_b"),
            bucket=round(_BUCKET * workers.byte_scale()),
        )

    def baseline(self, runs: Sequence[BaselineRun]) -> list[HeterogeneousRow]:
        """Run torch on several layouts, concurrently."""
        timeout = (_BASELINE_STEPS + 1) * self.setting.timeout
        return run_concurrently([partial(self._baseline, run) for run in runs], timeout=timeout)

    def _baseline(self, run: BaselineRun, barrier: Callable[[], object]) -> HeterogeneousRow:
        number, layout, microbatch_size = run
        plan = baseline_plan(layout, self.setting, microbatch_size)
        job = self.job(plan, _BASELINE_STEPS)
        return self._run("torch", f"random {number}", workers.torch_baseline, job, barrier)[0]

    def trainer(self, job: JobSetting) -> tuple[HeterogeneousRow, float]:
        """Run the Trainer; return also the loss of its final model on held-out samples."""
        row, log = self._run("ours", "planned", workers.trainer_worker, job, lambda: None)
        (held_out,) = {end.held_out for end in log.ends}
        assert held_out is not None, "all workers have evaluated"
        return row, held_out

    def _run(
        self,
        side: str,
        layout: str,
        work: Callable[..., None],
        job: JobSetting,
        barrier: Callable[[], object],
    ) -> tuple[HeterogeneousRow, JobLog]:
        name = f"heterogeneous: {side}, {layout}, micro-batches of {job.microbatch_size}"
        self.show(name)

        def on_step(log: JobLog) -> None:
            batches = log.num_samples // job.batch
            if batches > (log.num_samples - log.steps[-1].num_samples) // job.batch:
                seconds = log.steps[-1].moment - log.start
                self.show(f"{name}: {batches} of {job.num_steps} steps, {seconds:.1f} s")

        with Lab(self.cluster) as lab:
            make_links_fast(lab)
            with JobPool(lab, work, job) as pool:
                restore_links(lab)
                barrier()
                lab.report(reset=True)
                pool.begin()
                log = pool.follow(self.links, on_step)
                switch_timing = lab.report().switch_timing
        row = HeterogeneousRow(
            side=side,
            layout=layout,
            microbatch_size=job.microbatch_size,
            num_steps=job.num_steps,
            seconds=log.seconds,
            rate=log.rate,
            steady_rate=log.steady_rate,
            load=sum(end.cpu for end in log.ends) / log.seconds / _NUM_CORES,
            losses=log.losses(job),
            disturbed=switch_timing.trouble is not None,
        )
        return row, log

"""`polyrhythm plan`: place a model on a cluster; predict the step time and bound it from below."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from polyrhythm.errors import PlanError

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.plan.job import TrainingJob
    from polyrhythm.plan.plan import Plan, Sources
    from polyrhythm.plan.predict import Prediction
    from polyrhythm.plan.problem import Problem
    from polyrhythm.plan.search import PlanResult

_LARGEST = 64  # samples in a micro-batch of a built-in model


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommand:
    """Place a model on a cluster: stages, layers, averaging groups, micro-batches, schedule.

    polyrhythm plan cluster.toml profile.json --batch 512 -o plan.json
    """

    cluster: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CLUSTER")]
    """A TOML or JSON file, or the name of a bundled network."""
    profile: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROFILE")]
    """A TOML or JSON file, or a built-in model such as gpt-24x2048x2048."""
    batch: int | None = None
    """Samples per step, over all pipelines; by default those of --running."""
    objective: Literal["time", "cost", "both"] = "time"
    """The fastest step, the cheapest step, or the Pareto front of both."""
    pick: str = "fastest"
    """With --objective both, the plan to choose: fastest, cheapest, or its number in the table."""
    sync: Literal["all_reduce", "decoupled", "groups"] | None = None
    """Sync mode of the replicas; by default that of --running, or all_reduce."""
    stages: int | None = None
    """Number of stages, instead of the best one."""
    pipelines: int | None = None
    """Number of pipelines, instead of the best one."""
    microbatch_size: int | None = None
    """Samples per micro-batch, instead of the best profiled size."""
    schedule: str = "auto"
    """Schedule of all pipelines, such as 1f1b, instead of the best for each."""
    unequal: bool = True
    """Pipelines may differ in their numbers of micro-batches and of devices."""
    gradient_bytes: float = 1.0
    """Gradient bytes per byte of parameters: 2 for float32 gradients of float16 weights."""
    optimizer_bytes: float = 2.0
    """Optimizer bytes per byte of parameters: 2 for Adam, 6 for float32 Adam on float16 weights."""
    memory_reserve: float = 0.1
    """Fraction of each device's memory that stays free."""
    flops: float | None = None
    """For a built-in model: operations per second of a device of speed 1, such as 6e13."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """For a built-in model: its dtype; float32 by default."""
    running: Path | None = None
    """The plan of a running job: keep it, or switch to a better one if that pays off."""
    steps: int | None = None
    """With --running: the number of remaining steps."""
    seed: int = 0
    """Seed of the search: the same seed and files give the same plan."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """File for the plan, .json."""
    svg: Path | None = None
    """File for a picture of regions, pipelines and groups, .svg."""

    def run(self, console: "Console") -> int:
        self._check()
        running = None if self.running is None else self._load_running(self.running)
        problem = self._problem(running)
        if running is None:
            planned = self._planned(problem, console)
            chosen = self._chosen(planned, console)
        else:
            planned = self._replanned(running, problem, console)
            chosen = planned.best
        self._show(chosen, planned, problem, console)
        return 0

    def _check(self) -> None:
        from polyrhythm.schedule.spec import ScheduleSpec

        _check_target(self.out, ".json", "-o")
        _check_target(self.svg, ".svg", "--svg")
        if self.schedule != "auto":
            ScheduleSpec.parse(self.schedule)
        if (self.running is None) != (self.steps is None):
            raise PlanError(
                "--steps without --running"
                if self.running is None
                else "--running without --steps",
                expected="both or neither: the remaining steps must pay for a migration",
                fix="add --running plan.json --steps 1000, or omit both",
            )
        for flag, number, minimum in (("--steps", self.steps, 1), ("--seed", self.seed, 0)):
            if number is not None and number < minimum:
                raise PlanError(
                    f"{flag} {number}", expected=f"{minimum} or more", fix=f"correct {flag}"
                )
        if self.running is not None and self.objective == "both":
            raise PlanError(
                "--objective both with --running",
                expected="an objective with one best plan",
                fix="use --objective time or --objective cost",
            )
        if self.pick != "fastest" and self.objective != "both":
            raise PlanError(
                f"--pick {self.pick} with --objective {self.objective}",
                expected="--pick only with --objective both, which finds several plans",
                fix="add --objective both, or omit --pick",
            )
        if self.pick not in ("fastest", "cheapest") and not self.pick.isdecimal():
            raise self._no_such_plan("fastest, cheapest, or the number of a plan in the table")

    def _load_running(self, path: Path) -> "Plan":
        from polyrhythm.plan.plan import Plan

        return Plan.load(path)

    def _problem(self, running: "Plan | None") -> "Problem":
        from polyrhythm.cli.inputs import load_cluster, load_model
        from polyrhythm.plan.problem import Problem
        from polyrhythm.schedule.plan_schedules import PlannedSchedules

        job = self._job(running)
        cluster = load_cluster(self.cluster)
        profile = load_model(
            self.profile, cluster, flops=self.flops, dtype=self.dtype, sizes=_sizes(job)
        )
        return Problem(cluster=cluster, profile=profile, job=job, schedules=PlannedSchedules())

    def _job(self, running: "Plan | None") -> "TrainingJob":
        from polyrhythm.plan.job import Objective, TrainingJob

        batch: int | None = self.batch
        sync: str | None = self.sync
        if running is not None:
            batch = running.batch if batch is None else batch
            sync = sync or running.sync
        if batch is None:
            raise PlanError(
                "no --batch",
                expected="the number of samples per step, over all pipelines",
                fix="add --batch, such as --batch 512",
            )
        return TrainingJob(
            batch=batch,
            sync=sync or "all_reduce",
            objective=Objective.COST if self.objective == "cost" else Objective.TIME,
            gradient_bytes=self.gradient_bytes,
            optimizer_bytes=self.optimizer_bytes,
            memory_reserve=self.memory_reserve,
            num_stages=self.stages,
            num_pipelines=self.pipelines,
            microbatch_size=self.microbatch_size,
            schedule=self.schedule,
            unequal=self.unequal,
        )

    def _planned(self, problem: "Problem", console: "Console") -> "PlanResult":
        from polyrhythm.observe.plan_table import PlanProgress
        from polyrhythm.plan.job import Objective
        from polyrhythm.plan.search import make_plan, pareto_front

        def search(problem: "Problem") -> "PlanResult":
            with PlanProgress(console) as progress:
                return make_plan(problem, seed=self.seed, on_progress=progress.update)

        if self.objective != "both":
            return search(problem)
        # The cheapest first: this search refuses devices without a price.
        cheap = search(replace(problem, job=replace(problem.job, objective=Objective.COST)))
        fast = search(problem)
        return replace(fast, front=tuple(pareto_front([*fast.front, *cheap.front])))

    def _chosen(self, planned: "PlanResult", console: "Console") -> "Prediction":
        from polyrhythm.observe.plan_table import show_front

        if self.objective != "both":
            return planned.best
        front = planned.front
        numbers = {"fastest": 1, "cheapest": len(front)}
        number = numbers.get(self.pick) or int(self.pick)
        taken = number - 1
        show_front(front, taken=taken, console=console)
        if not 0 <= taken < len(front):
            raise self._no_such_plan(f"a number from 1 to {len(front)}")
        return front[taken]

    def _replanned(self, running: "Plan", problem: "Problem", console: "Console") -> "PlanResult":
        from polyrhythm.observe.plan_table import PlanProgress, show_change
        from polyrhythm.plan.predict import predict
        from polyrhythm.plan.replan import replan, reset_schedules

        assert self.steps is not None, "_check requires --steps with --running"
        try:
            now: Prediction | str = predict(reset_schedules(running, problem), problem)
        except PlanError as error:
            now = f"{error.wrong} (expected: {error.expected})"
        with PlanProgress(console) as progress:
            change = replan(
                running, problem, steps=self.steps, seed=self.seed, on_progress=progress.update
            )
        show_change(change, running=now, num_steps=self.steps, console=console)
        return change.planned

    def _show(
        self, chosen: "Prediction", planned: "PlanResult", problem: "Problem", console: "Console"
    ) -> None:
        from polyrhythm.observe.plan_svg import draw_plan
        from polyrhythm.observe.plan_table import show_plan
        from polyrhythm.tables import print_line

        show_plan(chosen, planned, console)
        if self.out is not None:
            replace(chosen.plan, sources=self._sources(self.out)).save(self.out)
            print_line(console, f"written to {self.out}")
        if self.svg is not None:
            self.svg.write_text(draw_plan(chosen.plan, problem.cluster), encoding="utf-8")
            print_line(console, f"drawn in {self.svg}")

    def _sources(self, out: Path) -> "Sources":
        from polyrhythm.cli.inputs import relative_to
        from polyrhythm.plan.plan import Sources

        return Sources(
            cluster=relative_to(self.cluster, out),
            profile=relative_to(self.profile, out),
            flops=self.flops,
            dtype=self.dtype,
            gradient_bytes=self.gradient_bytes,
            optimizer_bytes=self.optimizer_bytes,
            memory_reserve=self.memory_reserve,
        )

    def _no_such_plan(self, expected: str) -> PlanError:
        return PlanError(f"--pick {self.pick}", expected=expected, fix="--pick fastest")


def _check_target(path: Path | None, ending: str, flag: str) -> None:
    from polyrhythm.describe.write import check_target

    if path is not None:
        check_target(path, (ending,), flag=flag)


def _sizes(job: "TrainingJob") -> list[int]:
    """Return a built-in model's micro-batch sizes: the job's, or powers of 2 dividing its batch."""
    if job.microbatch_size is not None:
        return [job.microbatch_size]
    powers = (2**power for power in range(_LARGEST.bit_length()))
    return [size for size in powers if job.batch % size == 0]

"""`polyrhythm simulate`: a plan in virtual time, by several policies and schedules, what if."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from polyrhythm.errors import DescriptionError, PlanError

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.describe.cluster import Cluster
    from polyrhythm.describe.scenario import Scenario
    from polyrhythm.plan.plan import Plan
    from polyrhythm.plan.problem import Problem
    from polyrhythm.simulate.compare import Way

_PLANNED = "planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateCommand:
    """Run a plan in virtual time: step time, waiting, staleness, bytes and money, side by side.

    polyrhythm simulate plan.json --scenario sdpipe_b --sync all_reduce,adaptive
    """

    plan: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PLAN")]
    """What `polyrhythm plan -o` wrote."""
    cluster: str | None = None
    """Instead of what the plan was made for: a file, or the name of a bundled network."""
    profile: str | None = None
    """Instead of what the plan was made for: a file, or a model that comes along."""
    flops: float | None = None
    """For a model that comes along: operations per second of a device of speed 1."""
    sync: str = _PLANNED
    """Policies with commas between them, such as all_reduce,decoupled,adaptive; else the plan's."""
    schedule: str = _PLANNED
    """Schedules with semicolons between them, such as "1f1b;kfkb:2;bounded:7,5,3,1"; or auto."""
    overlap: bool = False
    """Go on at once, and take in averages at the end of the next step, where a policy can."""
    scenario: str | None = None
    """What befalls the cluster: a file, or one that comes along, such as sdpipe_b."""
    spot: str | None = None
    """Devices are taken away and come back as recorded: a file, or one that comes along."""
    spot_duration: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """Squeeze that recording into so much time, such as 10min."""
    what_if: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Such as "link Tokyo-Seoul x0.5" or "device 3 slow x4": once more with that, too."""
    converge: Literal["quadratic", "perceptron"] | None = None
    """Train a small problem as well, and show loss and how far workers are apart."""
    lr: float = 0.05
    """With --converge: the learning rate."""
    steps: int = 20
    """Global steps to simulate."""
    seed: int = 0
    """Of policies that draw."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """A folder for the logs of all runs, which `polyrhythm report` reads."""

    def run(self, console: "Console") -> int:
        from polyrhythm.simulate.compare import show_links, show_ways

        if self.steps < 1:
            raise PlanError(f"--steps {self.steps}", expected="1 or more", fix="use 20")
        ways = list(self._ways())
        show_ways(ways, console)
        show_links(ways[0], console)
        if self.converge is not None:
            self._show_curves(ways, console)
        return 0

    def _show_curves(self, ways: "list[Way]", console: "Console") -> None:
        from polyrhythm.simulate.compare import show_curves
        from polyrhythm.simulate.converge import converge
        from polyrhythm.simulate.problems import perceptron, quadratic

        make = quadratic if self.converge == "quadratic" else perceptron
        curves = []
        for way in ways:
            problem = make(len(way.job.pipelines), seed=self.seed)
            curve = converge(way.job, problem, num_steps=self.steps, lr=self.lr)
            curves.append((way.name, curve))
        show_curves(curves, console)

    def _ways(self) -> "Iterator[Way]":
        from polyrhythm.plan.plan import Plan
        from polyrhythm.simulate.what_if import what_if

        plan = Plan.load(self.plan)
        problem, scenario = self._problem(plan)
        yield from self._simulated(plan, problem, scenario, "")
        for sentence in self.what_if:
            cluster, befalls = what_if(sentence, problem.cluster, scenario)
            yield from self._simulated(plan, _with(problem, cluster), befalls, sentence)

    def _simulated(
        self, plan: "Plan", problem: "Problem", scenario: "Scenario", sentence: str
    ) -> "Iterator[Way]":
        from polyrhythm.simulate.compare import Way
        from polyrhythm.simulate.planned import planned_job
        from polyrhythm.simulate.simulator import simulate

        for schedule in self.schedule.split(";"):
            for policy in self.sync.split(","):
                job = planned_job(
                    plan,
                    problem,
                    sync=None if policy == _PLANNED else policy.strip(),
                    schedule=None if schedule == _PLANNED else schedule.strip(),
                    overlap=self.overlap and policy.strip() not in _NEVER_OVERLAP,
                    scenario=scenario,
                    seed=self.seed,
                )
                named = [plan.sync if policy == _PLANNED else policy.strip()]
                named += [schedule.strip()] if self.schedule != _PLANNED else []
                named += [f"if {sentence}"] if sentence else []
                name = ", ".join(named)
                run = None if self.out is None else self.out / _file_name(name)
                found = simulate(job, num_steps=self.steps, run=run)
                yield Way(name=name, job=job, found=found)

    def _problem(self, plan: "Plan") -> "tuple[Problem, Scenario]":
        from polyrhythm.cli.described import load_cluster, load_model
        from polyrhythm.plan.job import Job
        from polyrhythm.plan.plan import Sources
        from polyrhythm.plan.problem import Problem
        from polyrhythm.schedule.planned import PlannedSchedules

        made = plan.sources or Sources(cluster="", profile="")
        cluster = load_cluster(self.cluster or self._made_for("cluster", made.cluster))
        own = self.profile is None
        profile = load_model(
            self.profile or self._made_for("profile", made.profile),
            cluster,
            flops=self.flops or (made.flops if own else None),
            dtype=made.dtype if own else None,
            sizes=[plan.microbatch_size or 1],
        )
        job = Job(
            batch=plan.batch or 1,
            sync=plan.sync,
            gradient_bytes=made.gradient_bytes,
            optimizer_bytes=made.optimizer_bytes,
            memory_reserve=made.memory_reserve,
        )
        problem = Problem(cluster=cluster, profile=profile, job=job, schedules=PlannedSchedules())
        return problem, self._scenario(cluster)

    def _made_for(self, what: str, source: str) -> str:
        from polyrhythm.cli.described import found_beside

        if not source:
            raise PlanError(
                f"{self.plan} does not say what {what} it was made for",
                expected=f"--{what}, or a plan that `polyrhythm plan -o` wrote",
                fix=f"add --{what} FILE",
            )
        return found_beside(source, self.plan)

    def _scenario(self, cluster: "Cluster") -> "Scenario":
        from dataclasses import replace

        from polyrhythm.describe.scenario import Scenario
        from polyrhythm.describe.spot import spot_scenario
        from polyrhythm.describe.units import parse
        from polyrhythm.types import Seconds

        scenario = Scenario(name="calm") if self.scenario is None else Scenario.load(self.scenario)
        try:
            scenario.check(cluster)
        except DescriptionError as error:
            raise error.at(str(self.scenario)) from None
        if self.spot is None:
            return scenario
        lasts = None if self.spot_duration is None else parse(self.spot_duration, Seconds)
        taken = spot_scenario(self.spot, cluster, duration=lasts)
        return replace(
            scenario, kill=(*scenario.kill, *taken.kill), join=(*scenario.join, *taken.join)
        )


_NEVER_OVERLAP = ("all_reduce", "balanced", "decoupled", "ssp")


def _with(problem: "Problem", cluster: "Cluster") -> "Problem":
    from polyrhythm.plan.problem import Problem

    return Problem(
        cluster=cluster, profile=problem.profile, job=problem.job, schedules=problem.schedules
    )


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)

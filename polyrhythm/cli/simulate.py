"""`polyrhythm simulate`: run a plan in virtual time with several policies and schedules."""

import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
    from polyrhythm.simulate.compare import Variant
    from polyrhythm.simulate.job import SimulatedJob
    from polyrhythm.types import Seconds

_AS_PLANNED = "planned"
# Commas also separate the limits of one schedule; only a comma before a name separates schedules.
_BETWEEN_SCHEDULES = re.compile(r";|,(?=\s*(?:[a-z]|\d+f))", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateCommand:
    """Run a plan in virtual time and compare step time, waiting, staleness, bytes and price.

    Compare policies under stragglers:

    polyrhythm simulate plan.json --scenario sdpipe_b --sync all_reduce,adaptive

    Compare schedules, also with a slower device:

    polyrhythm simulate plan.json --schedule 1f1b,gpipe --what-if "device 3 slow x4"

    Show the cost of lost spot instances:

    polyrhythm simulate plan.json --spot bamboo_aws_p3 --spot-duration 10min
    """

    plan: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PLAN")]
    """A plan that `polyrhythm plan -o` wrote."""
    cluster: str | None = None
    """Cluster file or bundled network; by default the one that the plan was made for."""
    profile: str | None = None
    """Profile file or built-in model; by default the one that the plan was made for."""
    flops: float | None = None
    """For a built-in model: operations per second of a device of speed 1."""
    sync: str = _AS_PLANNED
    """Comma-separated policies, such as all_reduce,decoupled,adaptive; by default the plan's."""
    schedule: str = _AS_PLANNED
    """Comma-separated schedules, such as 1f1b,kfkb:2,bounded:7,5,3,1; or auto."""
    overlap: bool = False
    """Overlap averaging with the next step and apply the average at its end, if supported."""
    scenario: str | None = None
    """Slowdowns, link changes and faults: a file, or a bundled scenario such as sdpipe_b."""
    spot: str | None = None
    """Recording of preempted and returning devices: a file, or a bundled one."""
    spot_duration: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """Scale that recording to this duration, such as 10min."""
    what_if: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Also simulate with a change such as "link Tokyo-Seoul x0.5" or "device 3 slow x4"."""
    replan: bool = False
    """After a loss in an exact mode, divide the layers anew where that is predicted to pay off.
    The runtime keeps the layers."""
    converge: Literal["quadratic", "perceptron"] | None = None
    """Also train a small problem, and show its loss and the distance between workers' models."""
    lr: float = 0.05
    """With --converge: the learning rate."""
    steps: int = 20
    """Global steps to simulate."""
    seed: int = 0
    """Seed of random policies."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Folder for the logs of all runs, which `polyrhythm report` reads."""

    def run(self, console: "Console") -> int:
        from polyrhythm.simulate.compare import show_links, show_variants

        self._check()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            variants = list(self._variants(console))
        show_variants(variants, console)
        if self.spot is not None:
            self._show_losses(self.spot, variants, console)
        show_links(variants[0], console)
        if self.converge is not None:
            self._show_curves(variants, console)
        for message in dict.fromkeys(str(warning.message) for warning in caught):
            _warn(message)
        return 0

    def _check(self) -> None:
        if self.steps < 1:
            raise PlanError(f"--steps {self.steps}", expected="1 or more", fix="use 20")
        if not 0 < self.lr < float("inf"):
            raise PlanError(f"--lr {self.lr:g}", expected="more than 0", fix="use 0.05")
        if self.out is not None:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise PlanError(
                    f"--out {self.out}: {error.strerror}",
                    expected="a writable folder",
                    fix="pass another one",
                ) from None
        if self.spot_duration is not None and self.spot is None:
            raise PlanError(
                "--spot-duration without --spot",
                expected="--spot with a recording to scale",
                fix="add --spot bamboo_aws_p3, or omit --spot-duration",
            )

    def _show_curves(self, variants: "list[Variant]", console: "Console") -> None:
        from polyrhythm.simulate.compare import show_curves
        from polyrhythm.simulate.convergence import converge
        from polyrhythm.simulate.problems import perceptron, quadratic
        from polyrhythm.sinks.progress import SimulationProgress

        make = quadratic if self.converge == "quadratic" else perceptron
        curves = []
        with SimulationProgress() as progress:
            for variant in variants:
                progress.show_busy(f"{variant.name}, a small problem")
                problem = make(len(variant.job.pipelines), seed=self.seed)
                curve = converge(variant.job, problem, num_steps=self.steps, lr=self.lr)
                curves.append((variant.name, curve))
        show_curves(curves, console)

    def _show_losses(self, spot: str, variants: "list[Variant]", console: "Console") -> None:
        from polyrhythm.describe.spot import SpotTrace
        from polyrhythm.describe.units import show
        from polyrhythm.simulate.compare import show_losses
        from polyrhythm.types import Seconds

        length = self._scaled_length or SpotTrace.load(spot).length
        kills = self._spot_scenario(spot, variants[0].job.cluster).kill
        show_losses(variants, kills, length, console)
        longest = max(variant.result.duration for variant in variants)
        if longest > length:
            _warn(
                f"the recording {spot} ends after {show(length, Seconds)} of the "
                f"{show(longest, Seconds)} simulated; its last state stays in effect"
            )

    def _variants(self, console: "Console") -> "Iterator[Variant]":
        from polyrhythm.simulate.compare import Variant
        from polyrhythm.simulate.simulator import simulate
        from polyrhythm.sinks.progress import SimulationProgress

        jobs = list(self._jobs(console))  # check all jobs before simulating the first
        with SimulationProgress() as progress:
            for name, job in jobs:
                run = None if self.out is None else self.out / _file_name(name)
                observers = progress.observers_for(name, self.steps * len(job.sync.workers))
                result = simulate(
                    job, num_steps=self.steps, observers=observers, run=run, replans=self.replan
                )
                yield Variant(name=name, job=job, result=result)

    def _jobs(self, console: "Console") -> "Iterator[tuple[str, SimulatedJob]]":
        from polyrhythm.plan.plan import Plan
        from polyrhythm.simulate.what_if import what_if
        from polyrhythm.tables import print_line

        plan = Plan.load(self.plan)
        problem, scenario = self._problem(plan)
        if plan.cluster and plan.cluster != problem.cluster.name:
            clusters = f"{plan.cluster!r}, simulated on {problem.cluster.name!r}"
            print_line(console, f"note: planned for {clusters}")
        changes = [what_if(sentence, problem.cluster, scenario) for sentence in self.what_if]
        for changed_scenario in (scenario, *(changed for _, changed in changes)):
            self._check_converges(changed_scenario)
        yield from self._named(plan, problem, scenario, "")
        for sentence, (cluster, changed_scenario) in zip(self.what_if, changes, strict=True):
            yield from self._named(
                plan, replace(problem, cluster=cluster), changed_scenario, sentence
            )

    def _named(
        self, plan: "Plan", problem: "Problem", scenario: "Scenario", sentence: str
    ) -> "Iterator[tuple[str, SimulatedJob]]":
        from polyrhythm.simulate.from_plan import planned_job

        for schedule in _BETWEEN_SCHEDULES.split(self.schedule):
            for option in self.sync.split(","):
                policy = plan.sync if option == _AS_PLANNED else option.strip()
                job = planned_job(
                    plan,
                    problem,
                    sync=policy,
                    schedule=None if schedule == _AS_PLANNED else schedule.strip(),
                    overlap=self.overlap,
                    scenario=scenario,
                    seed=self.seed,
                )
                names = [f"{policy} overlap" if job.overlap else policy]
                names += [schedule.strip()] if self.schedule != _AS_PLANNED else []
                names += [f"if {sentence}"] if sentence else []
                yield ", ".join(names), job

    def _check_converges(self, scenario: "Scenario") -> None:
        if self.converge is not None and (scenario.kill or scenario.join):
            raise PlanError(
                "--converge with devices that are lost or join",
                expected="a fixed set of workers, since lost workers' models would count",
                fix="omit --converge, or omit --spot and a scenario's kills and joins",
            )

    def _problem(self, plan: "Plan") -> "tuple[Problem, Scenario]":
        from polyrhythm.plan.inputs import planned_inputs, problem_of

        cluster, profile = planned_inputs(
            plan, self.plan, cluster=self.cluster, profile=self.profile, flops=self.flops
        )
        return problem_of(plan, cluster, profile), self._scenario(cluster)

    def _scenario(self, cluster: "Cluster") -> "Scenario":
        from polyrhythm.describe.scenario import Scenario

        scenario = Scenario(name="calm") if self.scenario is None else Scenario.load(self.scenario)
        try:
            scenario.check(cluster)
        except DescriptionError as error:
            raise error.at(str(self.scenario)) from None
        if self.spot is None:
            return scenario
        spot = self._spot_scenario(self.spot, cluster)
        return replace(
            scenario, kill=(*scenario.kill, *spot.kill), join=(*scenario.join, *spot.join)
        )

    @property
    def _scaled_length(self) -> "Seconds | None":
        from polyrhythm.describe.units import parse
        from polyrhythm.types import Seconds

        return None if self.spot_duration is None else parse(self.spot_duration, Seconds)

    def _spot_scenario(self, spot: str, cluster: "Cluster") -> "Scenario":
        from polyrhythm.describe.spot import spot_scenario

        return spot_scenario(spot, cluster, duration=self._scaled_length)


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)

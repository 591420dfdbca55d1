"""`polyrhythm simulate`: a plan in virtual time, by several policies and schedules, what if."""

import re
import sys
import warnings
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
    from polyrhythm.simulate.compare import Variant
    from polyrhythm.simulate.job import SimulatedJob
    from polyrhythm.types import Seconds

_AS_PLANNED = "planned"
# Commas are also between the limits of one; what follows a limit is no schedule's name.
_BETWEEN_SCHEDULES = re.compile(r";|,(?=\s*(?:[a-z]|\d+f))", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateCommand:
    """Run a plan in virtual time: step time, waiting, staleness, bytes and money, side by side.

    Which policy copes with stragglers:

    polyrhythm simulate plan.json --scenario sdpipe_b --sync all_reduce,adaptive

    Which schedule, and what if a device is slower:

    polyrhythm simulate plan.json --schedule 1f1b,gpipe --what-if "device 3 slow x4"

    What losses of spot instances cost:

    polyrhythm simulate plan.json --spot bamboo_aws_p3 --spot-duration 10min
    """

    plan: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PLAN")]
    """What `polyrhythm plan -o` wrote."""
    cluster: str | None = None
    """Instead of what the plan was made for: a file, or the name of a bundled network."""
    profile: str | None = None
    """Instead of what the plan was made for: a file, or a model that comes along."""
    flops: float | None = None
    """For a model that comes along: operations per second of a device of speed 1."""
    sync: str = _AS_PLANNED
    """Policies with commas between them, such as all_reduce,decoupled,adaptive; else the plan's."""
    schedule: str = _AS_PLANNED
    """Schedules with commas between them, such as 1f1b,kfkb:2,bounded:7,5,3,1; or auto."""
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
        for words in dict.fromkeys(str(each.message) for each in caught):
            _warn(words)
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
                    expected="a folder that can be made and written to",
                    fix="give another one",
                ) from None
        if self.spot_duration is not None and self.spot is None:
            raise PlanError(
                "--spot-duration without --spot",
                expected="a recording to squeeze",
                fix="add --spot bamboo_aws_p3, or leave it out",
            )

    def _show_curves(self, variants: "list[Variant]", console: "Console") -> None:
        from polyrhythm.cli.simulation_progress import SimulationProgress
        from polyrhythm.simulate.compare import show_curves
        from polyrhythm.simulate.convergence import converge
        from polyrhythm.simulate.problems import perceptron, quadratic

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

        length = self._squeezed or SpotTrace.load(spot).length
        show_losses(variants, self._taken(spot, variants[0].job.cluster).kill, length, console)
        longest = max(variant.result.duration for variant in variants)
        if longest > length:
            ends = f"the recording {spot} ends after {show(length, Seconds)} of the"
            _warn(f"{ends} {show(longest, Seconds)} that were simulated, and is held at its end")

    def _variants(self, console: "Console") -> "Iterator[Variant]":
        from polyrhythm.cli.simulation_progress import SimulationProgress
        from polyrhythm.simulate.compare import Variant
        from polyrhythm.simulate.simulator import simulate

        jobs = list(self._jobs(console))  # what is wrong with any is said before all
        with SimulationProgress() as progress:
            for name, job in jobs:
                run = None if self.out is None else self.out / _file_name(name)
                observers = progress.observers_for(name, job, self.steps)
                found = simulate(job, num_steps=self.steps, observers=observers, run=run)
                yield Variant(name=name, job=job, result=found)

    def _jobs(self, console: "Console") -> "Iterator[tuple[str, SimulatedJob]]":
        from polyrhythm.plan.plan import Plan
        from polyrhythm.simulate.what_if import what_if
        from polyrhythm.tables import print_line

        plan = Plan.load(self.plan)
        problem, scenario = self._problem(plan)
        if plan.cluster and plan.cluster != problem.cluster.name:
            there = f"{plan.cluster!r}, simulated on {problem.cluster.name!r}"
            print_line(console, f"note: planned for {there}")
        changed = [what_if(sentence, problem.cluster, scenario) for sentence in self.what_if]
        for changed_scenario in (scenario, *(one for _, one in changed)):
            self._check_converges(changed_scenario)
        yield from self._named(plan, problem, scenario, "")
        for sentence, (cluster, changed_scenario) in zip(self.what_if, changed, strict=True):
            yield from self._named(plan, _with(problem, cluster), changed_scenario, sentence)

    def _named(
        self, plan: "Plan", problem: "Problem", scenario: "Scenario", sentence: str
    ) -> "Iterator[tuple[str, SimulatedJob]]":
        from polyrhythm.simulate.from_plan import planned_job

        for schedule in _BETWEEN_SCHEDULES.split(self.schedule):
            for given in self.sync.split(","):
                policy = plan.sync if given == _AS_PLANNED else given.strip()
                job = planned_job(
                    plan,
                    problem,
                    sync=policy,
                    schedule=None if schedule == _AS_PLANNED else schedule.strip(),
                    overlap=self.overlap,
                    scenario=scenario,
                    seed=self.seed,
                )
                named = [f"{policy} overlap" if job.overlap else policy]
                named += [schedule.strip()] if self.schedule != _AS_PLANNED else []
                named += [f"if {sentence}"] if sentence else []
                yield ", ".join(named), job

    def _check_converges(self, scenario: "Scenario") -> None:
        if self.converge is not None and (scenario.kill or scenario.join):
            raise PlanError(
                "--converge with devices that are lost or come back",
                expected="workers that stay: else models of those that are gone would count",
                fix="leave --converge out, or --spot and what kills devices",
            )

    def _problem(self, plan: "Plan") -> "tuple[Problem, Scenario]":
        from polyrhythm.cli.inputs import load_cluster, load_model
        from polyrhythm.plan.plan import Sources
        from polyrhythm.simulate.from_plan import problem_of

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
        problem = problem_of(plan, cluster, profile)
        return problem, self._scenario(cluster)

    def _made_for(self, what: str, source: str) -> str:
        from polyrhythm.cli.inputs import resolve_relative
        from polyrhythm.describe.bundled import is_name

        if not source:
            raise PlanError(
                f"{self.plan} does not say what {what} it was made for",
                expected=f"--{what}, or a plan that `polyrhythm plan -o` wrote",
                fix=f"add --{what} FILE",
            )
        found = resolve_relative(source, self.plan)
        if not is_name(source) and not Path(found).exists():
            raise PlanError(
                f"{self.plan} was made from {source}, which is not there beside it",
                expected=f"the {what} that it was made for",
                fix=f"add --{what} FILE, or put it back",
            )
        return found

    def _scenario(self, cluster: "Cluster") -> "Scenario":
        from dataclasses import replace

        from polyrhythm.describe.scenario import Scenario

        scenario = Scenario(name="calm") if self.scenario is None else Scenario.load(self.scenario)
        try:
            scenario.check(cluster)
        except DescriptionError as error:
            raise error.at(str(self.scenario)) from None
        if self.spot is None:
            return scenario
        taken = self._taken(self.spot, cluster)
        return replace(
            scenario, kill=(*scenario.kill, *taken.kill), join=(*scenario.join, *taken.join)
        )

    @property
    def _squeezed(self) -> "Seconds | None":
        from polyrhythm.describe.units import parse
        from polyrhythm.types import Seconds

        return None if self.spot_duration is None else parse(self.spot_duration, Seconds)

    def _taken(self, spot: str, cluster: "Cluster") -> "Scenario":
        from polyrhythm.describe.spot import spot_scenario

        return spot_scenario(spot, cluster, duration=self._squeezed)


def _with(problem: "Problem", cluster: "Cluster") -> "Problem":
    from polyrhythm.plan.problem import Problem

    return Problem(
        cluster=cluster, profile=problem.profile, job=problem.job, schedules=problem.schedules
    )


def _warn(words: str) -> None:
    print(f"warning: {words}", file=sys.stderr)


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)

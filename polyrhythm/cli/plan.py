"""`polyrhythm plan`: place a model on a cluster; predict the step time and bound it from below."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from polyrhythm.errors import PlanError
from polyrhythm.plan.options import PlanOptions, TrainingJob

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.describe.cluster import Cluster
    from polyrhythm.describe.model import ModelProfile
    from polyrhythm.plan.plan import Plan, Sources
    from polyrhythm.plan.predict import Prediction
    from polyrhythm.plan.problem import Problem
    from polyrhythm.plan.search import PlanResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommand:
    """Place a model on a cluster: stages, layers, averaging groups, micro-batches, schedule.

    polyrhythm plan cluster.toml profile.json --batch-size 512 -o plan.json
    """

    cluster: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CLUSTER")]
    """A TOML or JSON file, or the name of a bundled network."""
    profile: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROFILE")]
    """A TOML or JSON file; a built-in model such as gpt-24x2048x2048; a Hugging Face model such as
    gpt2,n_layer=4, which is counted; or file.py:factory, which is measured here."""
    batch_size: int | None = None
    """Samples per step, over all pipelines; by default those of --running."""
    planner: tyro.conf.OmitArgPrefixes[PlanOptions] = field(default_factory=PlanOptions)
    pick: str = "fastest"
    """With --objective both, the plan to choose: fastest, cheapest, or its number in the table."""
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
        from polyrhythm.plan.plan import Plan

        self._check()
        running = None if self.running is None else Plan.load(self.running)
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
        if self.planner.schedule != "auto":
            ScheduleSpec.parse(self.planner.schedule)
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
        if self.running is not None and self.planner.objective == "both":
            raise PlanError(
                "--objective both with --running",
                expected="an objective with one best plan",
                fix="use --objective time or --objective cost",
            )
        if self.pick != "fastest" and self.planner.objective != "both":
            raise PlanError(
                f"--pick {self.pick} with --objective {self.planner.objective}",
                expected="--pick only with --objective both, which finds several plans",
                fix="add --objective both, or omit --pick",
            )
        if self.pick not in ("fastest", "cheapest") and not self.pick.isdecimal():
            raise self._no_such_plan("fastest, cheapest, or the number of a plan in the table")

    def _problem(self, running: "Plan | None") -> "Problem":
        from polyrhythm.plan.inputs import builtin_sizes, load_cluster, load_model
        from polyrhythm.plan.problem import Problem

        job = self._job(running)
        cluster = load_cluster(self.cluster)
        if self._is_torch_model:
            profile = self._profile_here(cluster, builtin_sizes(job))
        else:
            profile = load_model(
                self.profile, cluster, flops=self.flops, dtype=self.dtype, sizes=builtin_sizes(job)
            )
        return Problem(cluster=cluster, profile=profile, job=job)

    @property
    def _is_torch_model(self) -> bool:
        """Whether the profile is a factory or a Hugging Face model, and is made here."""
        from polyrhythm.describe.bundled_files import bundled
        from polyrhythm.describe.profiles import is_builtin

        is_file = Path(self.profile).suffix in (".json", ".toml") or Path(self.profile).is_file()
        is_cluster = self.profile in bundled("networks")  # `load_model` says that they are swapped
        return ":" in self.profile or not (is_file or is_cluster or is_builtin(self.profile))

    def _profile_here(self, cluster: "Cluster", sizes: list[int]) -> "ModelProfile":
        from polyrhythm.run.profile.hugging_face import HuggingFaceModel
        from polyrhythm.run.profile.profile import count_profile, measure_profile

        if ":" in self.profile:
            if self.flops is not None:
                raise PlanError(
                    f"--flops {self.flops:g} for {self.profile}, which is measured",
                    expected="--flops only with a built-in or a Hugging Face model",
                    fix="leave --flops out",
                )
            return measure_profile(self.profile, dtype=self.dtype)
        _ = HuggingFaceModel(self.profile).config  # refuses an unknown name first
        flops = cluster.devices[0].flops if self.flops is None else self.flops
        if flops is None:
            raise PlanError(
                f"{self.profile} without the speed of the devices",
                expected="the operations per second of a device of speed 1, here or in the cluster",
                fix="add --flops 6e13; `polyrhythm probe` measures it",
            )
        dtype = self.dtype or cluster.flops_dtype or "float32"
        return count_profile(self.profile, flops=flops, sizes=sizes, dtype=dtype)

    def _job(self, running: "Plan | None") -> TrainingJob:
        batch_size = self.batch_size
        if batch_size is None and running is not None:
            batch_size = running.batch
        if batch_size is None:
            raise PlanError(
                "no --batch-size",
                expected="the number of samples per step, over all pipelines",
                fix="add --batch-size, such as --batch-size 512",
            )
        job = self.planner.job(batch_size)
        if running is not None and self.planner.sync is None:
            return replace(job, sync=running.sync)
        return job

    def _planned(self, problem: "Problem", console: "Console") -> "PlanResult":
        from polyrhythm.observe.plan_table import PlanProgress
        from polyrhythm.plan.search import search_plan

        with PlanProgress(console) as progress:
            return search_plan(problem, seed=self.seed, on_progress=progress.update)

    def _chosen(self, planned: "PlanResult", console: "Console") -> "Prediction":
        from polyrhythm.observe.plan_table import show_front

        if self.planner.objective != "both":
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
        from polyrhythm.describe.write import write_model
        from polyrhythm.observe.plan_svg import draw_plan
        from polyrhythm.observe.plan_table import show_plan, show_reserve
        from polyrhythm.tables import print_line

        show_plan(chosen, planned, console)
        show_reserve(chosen.plan, problem.cluster, console, buddy=problem.job.buddy)
        if self.out is not None:
            profile = self.profile
            if self._is_torch_model:  # other commands read it from the file
                profile = str(self.out.with_name(f"{self.out.stem}.profile.json"))
                write_model(problem.profile, Path(profile))
                print_line(console, f"profile written to {profile}")
            replace(chosen.plan, sources=self._sources(self.out, profile)).save(self.out)
            print_line(console, f"written to {self.out}")
        if self.svg is not None:
            self.svg.write_text(draw_plan(chosen.plan, problem.cluster), encoding="utf-8")
            print_line(console, f"drawn in {self.svg}")

    def _sources(self, out: Path, profile: str) -> "Sources":
        from polyrhythm.plan.inputs import sources_of

        is_builtin = profile == self.profile
        return sources_of(
            self.cluster,
            profile,
            self.planner,
            file=out,
            flops=self.flops if is_builtin else None,
            dtype=self.dtype if is_builtin else None,
        )

    def _no_such_plan(self, expected: str) -> PlanError:
        return PlanError(f"--pick {self.pick}", expected=expected, fix="--pick fastest")


def _check_target(path: Path | None, ending: str, flag: str) -> None:
    from polyrhythm.describe.write import check_target

    if path is not None:
        check_target(path, (ending,), flag=flag)

"""A demo job, checked before any process starts: configuration in, plan out.

No torch here: the command line reads `DemoConfig` and must start quickly.
"""

import time
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Literal, Self

import tomli_w

from polyrhythm.errors import LaunchError, PlanError, PolicyError
from polyrhythm.plan.plan import Plan, even_plan
from polyrhythm.run.pipeline.options import parse_schedule
from polyrhythm.schedule.check import check
from polyrhythm.sync.modes import SyncConfig
from polyrhythm.sync.setup import at_flag, check_sync, parse_options
from polyrhythm.types import AUTO, Seconds

MAX_TIMEOUT: Seconds = 86_400.0  # a day; timers overflow at some point beyond
_SYNC_OPTIONS = "--sync-options"


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    num_blocks: int = 4
    width: int = 128
    num_heads: int = 4
    context: int = 128  # context length in bytes

    def __post_init__(self) -> None:
        if self.num_blocks < 0 or self.context < 1:
            raise LaunchError(
                f"{self.num_blocks} blocks over a context of {self.context}",
                expected="0 or more blocks, and a context of at least 1",
                fix="pass --blocks and --context in this range",
            )
        if self.width < 1 or self.width % self.num_heads:
            raise LaunchError(
                f"width {self.width} for {self.num_heads} heads",
                expected=f"a multiple of {self.num_heads}",
                fix=f"use --width {max(1, round(self.width / self.num_heads)) * self.num_heads}",
            )

    @property
    def num_layers(self) -> int:
        """An embedding, the blocks, and a head."""
        return self.num_blocks + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """The model, its data, and how both are divided."""

    num_stages: int = 2
    """Number of stages that the model is split into."""
    num_pipelines: int = 2
    """Replicas of the whole pipeline."""
    steps: int = 200
    """Optimizer steps."""
    microbatches: int = 4
    """Micro-batches per pipeline and step."""
    microbatch_size: int = 4
    """Sequences in a micro-batch."""
    schedule: str = "1f1b"
    """Order in which a stage runs its micro-batches: auto (measures and chooses), 1f1b, gpipe,
    kfkb:K, or bounded:L0,L1,... with the in-flight limit of each stage."""
    sync: str = "decoupled"
    """Sync mode of the replicas: decoupled, all_reduce, balanced (gradients of all), adaptive, age,
    static, smart, random, pairwise, partial_reduce (models, in groups), local (models, every 500
    steps), or auto (measures and chooses)."""
    sync_options: tuple[str, ...] = ()
    """Options of the sync mode: name=value, once or more, or one JSON object, such as
    group_size=2 for partial_reduce."""
    blocks: int = 4
    """Transformer blocks of the model; an embedding and a head are added."""
    width: int = 128
    """Width of the model."""
    context: int = 128
    """Context length of the model in bytes of text."""
    lr: float = 2e-3
    """Learning rate of AdamW, after a warm-up over the first tenth of the steps."""
    seed: int = 0
    """Seed of weights and data: the same seed gives the same losses."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on: auto uses the GPUs if there are any."""
    text: Path | None = None
    """A text file to train on, of which 8 MB are used, instead of Python's standard library."""
    timeout: Seconds = 60.0
    """Seconds to wait for another worker before it counts as lost."""

    @property
    def policy_options(self) -> dict[str, object]:
        """`sync_options` as the policy's arguments."""
        return parse_options(self.sync_options, flag=_SYNC_OPTIONS)

    @property
    def shape(self) -> GPTShape:
        return GPTShape(num_blocks=self.blocks, width=self.width, context=self.context)

    @property
    def batch_size(self) -> int:
        """Sequences in a step, over all pipelines."""
        return self.num_pipelines * self.microbatches * self.microbatch_size

    def save(self, path: Path) -> None:
        chosen = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}
        path.write_text(tomli_w.dumps({k: v for k, v in chosen.items() if v is not None}))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoJob:
    settings: DemoConfig
    plan: Plan

    @classmethod
    def of(cls, settings: DemoConfig) -> Self:
        """Check the settings and make the plan; raises UserError before any process starts."""
        _check(settings)
        plan = even_plan(
            num_layers=settings.shape.num_layers,
            num_stages=settings.num_stages,
            num_pipelines=settings.num_pipelines,
        )
        if settings.schedule != AUTO:
            num_microbatches = settings.microbatches
            spec = parse_schedule(settings.schedule)
            schedule = spec.build(num_stages=settings.num_stages, num_microbatches=num_microbatches)
            check(schedule, num_microbatches=num_microbatches)
        _check_sync(settings)
        return cls(settings=settings, plan=plan)

    def check_processes(self, num_processes: int) -> None:
        if num_processes != self.plan.num_workers:
            stages, pipelines = self.plan.num_stages, self.plan.num_pipelines
            raise PlanError(
                f"{num_processes} processes for {stages} stages x {pipelines} pipelines",
                expected=f"{self.plan.num_workers} processes",
                fix=f"use torchrun --nproc-per-node={self.plan.num_workers}, "
                "or other --num-stages and --num-pipelines",
            )

    def save(self, run: Path) -> None:
        self.settings.save(run / "config.toml")
        self.plan.save(run / "plan.json")


def _check(settings: DemoConfig) -> None:
    # Not in DemoConfig.__post_init__: the command line parser would wrap the message.
    for name in ("num_stages", "num_pipelines", "steps", "microbatches", "microbatch_size"):
        if getattr(settings, name) < 1:
            raise _invalid(name, getattr(settings, name), "at least 1")
    if not 0 <= settings.seed < 2**31:
        raise _invalid("seed", settings.seed, "0 or more, below 2**31")
    if not 0 < settings.lr < float("inf"):
        raise _invalid("lr", settings.lr, "a finite number above 0")
    if not 0 < settings.timeout <= MAX_TIMEOUT:
        raise _invalid("timeout", settings.timeout, f"seconds, up to {MAX_TIMEOUT:g}")


def _check_sync(settings: DemoConfig) -> None:
    options = settings.policy_options
    try:
        sync = SyncConfig(settings.sync, options=options)
        check_sync(sync, num_stages=settings.num_stages, num_pipelines=settings.num_pipelines)
    except PolicyError as error:
        raise at_flag(error, flag=_SYNC_OPTIONS) from None


def new_run_folder(parent: Path, name: str) -> Path:
    """Make a new folder for a run, named by `name` and time; two jobs never share one."""
    stem = time.strftime(f"{name}-%Y%m%d-%H%M%S")
    for number in count(1):
        run = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            run.mkdir(parents=True)
        except FileExistsError:
            if not parent.is_dir():
                raise _cannot_write(parent, "it is a file") from None
        except OSError as error:
            raise _cannot_write(parent, str(error.strerror)) from None
        else:
            return run
    raise AssertionError("count never ends")


def _cannot_write(folder: Path, why: str) -> LaunchError:
    return LaunchError(
        f"run folder in {folder}: {why}",
        expected="a folder that can be written",
        fix="pass another one: --out FOLDER",
    )


def _invalid(name: str, value: object, expected: str) -> LaunchError:
    flag = "--" + name.replace("_", "-")
    return LaunchError(f"{flag} {value}", expected=expected, fix=f"pass another {flag}")

"""The options of a pipeline, checked before any communication."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyrhythm.describe.units import parse
from polyrhythm.errors import ScheduleError
from polyrhythm.schedule.builders import Schedule
from polyrhythm.schedule.limits import one_f_one_b_limits
from polyrhythm.schedule.spec import ExplicitSchedule, ScheduleSpec
from polyrhythm.types import AUTO, Bytes, Seconds

# Per shared parameter, its name on each stage that has it: torch's `Pipe.replicated_params`.
TiedNames = Sequence[Mapping[int | str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The options of `Pipeline`; `text` has those that must be equal on all stages."""

    n_microbatches: int | None
    microbatch_sizes: Sequence[int] | None
    schedule: str | ScheduleSpec | Schedule
    flush: bool
    scale_grads: bool
    tune_every: int
    window: int | None
    timeout: Seconds
    memory_limit: str | Bytes | None
    optimizer_floats: float
    tied: TiedNames | None = None
    has_loss: bool = True

    def __post_init__(self) -> None:
        self._check_microbatches()
        for name in ("tune_every", "window", "timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ScheduleError(f"{name}={value}", expected="more than 0", fix=f"omit {name}")
        if self.memory_limit is not None and not self.is_tuned:
            what = "flush=False" if not self.flush else f"the schedule {self.spec}"
            raise ScheduleError(
                f"a memory limit of {self.memory_limit} with {what}",
                expected="schedule='auto', which chooses within the limit",
                fix="omit schedule and flush, or omit memory_limit",
            )
        _ = self.spec, self.limit_bytes  # raises if one cannot be parsed
        if not self.flush and self.n_microbatches != 1:
            raise ScheduleError(
                f"flush=False with n_microbatches={self.n_microbatches}",
                expected="n_microbatches=1: a batch is not split",
                fix="pass smaller batches one by one, or use flush=True",
            )

    @property
    def is_tuned(self) -> bool:
        return self.schedule == AUTO and self.flush

    @property
    def sizes_to_try(self) -> tuple[int, ...]:
        """The micro-batch sizes from which the tuner chooses; empty without a choice."""
        sizes = tuple(self.microbatch_sizes or ())
        return sizes if self.is_tuned and len(sizes) > 1 else ()

    @property
    def spec(self) -> ScheduleSpec | ExplicitSchedule:
        """The initial schedule."""
        if isinstance(self.schedule, str):
            return ScheduleSpec("1f1b") if self.schedule == AUTO else parse_schedule(self.schedule)
        if isinstance(self.schedule, ScheduleSpec):
            return self.schedule
        return ExplicitSchedule.of(self.schedule)

    @property
    def limit_bytes(self) -> Bytes | None:
        limit = self.memory_limit
        return (
            None if limit is None else int(parse(limit, Bytes) if isinstance(limit, str) else limit)
        )

    @property
    def text(self) -> str:
        """The options that must be equal on all stages, as text for error messages."""
        microbatches = self.n_microbatches or list(self.microbatch_sizes or ())
        schedule = AUTO if self.is_tuned else self.spec
        return (
            f"micro-batches {microbatches}, schedule {schedule}, flush {self.flush}, "
            f"scale_grads {self.scale_grads}, tune_every {self.tune_every}, window {self.window}, "
            f"{'a' if self.has_loss else 'no'} loss_fn, tied {list(map(dict, self.tied or ()))}"
        )

    def pipedream_limits(self, num_stages: int) -> tuple[int, ...]:
        """Return the limits of batches in flight per stage without a flush."""
        spec = self.spec
        if isinstance(spec, ScheduleSpec) and spec.name == "1f1b":
            return one_f_one_b_limits(num_stages)
        limits = spec.limits if isinstance(spec, ScheduleSpec) else None
        if limits is not None and len(limits) == num_stages:
            return limits
        raise ScheduleError(
            f"the schedule {spec} without a flush on {num_stages} stages",
            expected=f"1f1b, or bounded with {num_stages} limits",
            fix="use schedule='1f1b', or keep flush=True",
        )

    def _check_microbatches(self) -> None:
        if (self.n_microbatches is None) == (self.microbatch_sizes is None):
            raise ScheduleError(
                f"n_microbatches={self.n_microbatches}, microbatch_sizes={self.microbatch_sizes}",
                expected="one of the two",
                fix="pass n_microbatches=8 to split every batch into 8, or "
                "microbatch_sizes=[1, 2, 4] to let schedule='auto' choose",
            )
        sizes: list[object] = [*(self.microbatch_sizes or ()), self.n_microbatches or 0]
        if not all(isinstance(size, int) for size in sizes):
            raise ScheduleError(
                f"{sizes[0]!r} as a number of micro-batches or samples",
                expected="an integer",
                fix="pass n_microbatches=8; it is the second argument, before loss_fn",
            )
        least = min(self.microbatch_sizes or [self.n_microbatches or 0])
        if least < 1:
            raise ScheduleError(
                f"{least} samples or micro-batches", expected="1 or more", fix="pass an integer"
            )
        if len(self.microbatch_sizes or ()) > 1 and not self.is_tuned:
            raise ScheduleError(
                f"{len(self.microbatch_sizes or ())} micro-batch sizes for the schedule "
                f"{self.spec}",
                expected="one size, or schedule='auto', which chooses",
                fix="omit schedule",
            )


def parse_schedule(text: str) -> ScheduleSpec:
    """Parse a schedule; its error also offers auto."""
    try:
        return ScheduleSpec.parse(text)
    except ScheduleError as error:
        raise ScheduleError(
            error.wrong, expected=f"{AUTO}, or {error.expected}", fix=error.fix
        ) from None

"""The numbers of stages and pipelines of a job that has no plan: one may follow from the other."""

from collections.abc import Mapping
from dataclasses import dataclass

from polyrhythm.errors import PlanError

# Of the environment: what `polyrhythm train --stages --pipelines` sets for the Trainer.
STAGES_VARIABLE, PIPELINES_VARIABLE = "POLYRHYTHM_STAGES", "POLYRHYTHM_PIPELINES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """The numbers of stages and pipelines; None follows from the number of processes."""

    stages: int | None = None
    pipelines: int | None = None

    def __post_init__(self) -> None:
        for name in ("stages", "pipelines"):
            value = getattr(self, name)
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_integer and value >= 1):
                raise PlanError(
                    f"{name}={value!r}",
                    expected="an integer from 1 on",
                    fix=f"pass another number of {name}, or omit it",
                )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Degrees":
        """Read the variables that `polyrhythm train` sets."""
        found: dict[str, int] = {}
        for name, variable in (("stages", STAGES_VARIABLE), ("pipelines", PIPELINES_VARIABLE)):
            if text := environ.get(variable, "").strip():
                if not text.isdecimal():
                    raise PlanError(
                        f"{variable}={text}", expected="an integer from 1 on", fix="correct it"
                    )
                found[name] = int(text)
        return cls(**found)

    @property
    def environment(self) -> dict[str, str]:
        values = {STAGES_VARIABLE: self.stages, PIPELINES_VARIABLE: self.pipelines}
        return {name: str(value) for name, value in values.items() if value is not None}

    @property
    def are_given(self) -> bool:
        return self.stages is not None or self.pipelines is not None

    @property
    def num_processes(self) -> int:
        """The least number of processes."""
        return (self.stages or 1) * (self.pipelines or 1)

    def __str__(self) -> str:
        values = {"stages": self.stages, "pipelines": self.pipelines}
        return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)

    def complete(self, num_processes: int) -> tuple[int, int]:
        """Return stages and pipelines for this many processes; raise PlanError if none fit."""
        if self.stages is not None and self.pipelines is not None:
            if self.num_processes != num_processes:
                raise self._misfit(num_processes, [self.num_processes])
            return self.stages, self.pipelines
        given = self.num_processes
        if num_processes % given:
            below = num_processes // given * given
            raise self._misfit(num_processes, [n for n in (below, below + given) if n])
        other = num_processes // given
        return (given, other) if self.stages is not None else (other, given)

    def _misfit(self, num_processes: int, fitting: list[int]) -> PlanError:
        plural = "es" * (num_processes > 1)
        name = "stages" if self.stages is not None else "pipelines"
        divisors = [str(n) for n in range(1, num_processes + 1) if num_processes % n == 0]
        both = self.stages is not None and self.pipelines is not None
        numbers = " or ".join(map(str, fitting))
        return PlanError(
            f"{self} with {num_processes} process{plural}",
            expected=f"{numbers} processes"
            + (", one for each stage of each pipeline" if both else f", a multiple of {name}"),
            fix=f"start {numbers} (polyrhythm train --local {fitting[-1]}, or torchrun); or for "
            f"{num_processes} process{plural} use {name}={' or '.join(divisors)}"
            + (" and omit pipelines" if both else ""),
        )

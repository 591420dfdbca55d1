"""`polyrhythm profile`: what the layers of a model take, measured or counted, into a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from polyrhythm.errors import DescriptionError

if TYPE_CHECKING:
    from rich.console import Console

    from polyrhythm.describe.model import ModelProfile

_REPEAT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measure the layers of a torch model, or count those of a model that comes along.

    The factory returns the model (an nn.Sequential, or a list of layers) and an example input:
    polyrhythm profile my_model:build -o profile.json
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """module:factory, to be measured; or, with --flops, bert-base, bert-large, resnet50, or
    gpt-24x2048x2048 for 24 layers, a width of 2048 and 2048 tokens."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("profile.json")
    """The file, .json or .toml."""
    sizes: tuple[int, ...] = ()
    """Samples in a micro-batch, once or more: the first is the profile's own. Else that of the
    example, then half, a quarter, and one."""
    repeat: int = _REPEAT
    """Runs whose median counts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure: auto takes a GPU if there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Turn the model's numbers into this type; else they are as the factory made them. Of a model
    that comes along: float32 unless given."""
    flops: float | None = None
    """Operations per second of the device, for a model that comes along, such as 6e13."""

    def run(self, console: "Console") -> int:
        from polyrhythm.describe.write import check_target, write_model
        from polyrhythm.observe import description
        from polyrhythm.tables import print_line

        self._check()
        check_target(self.out, (".json", ".toml"))
        write_model(self._measured(console) if ":" in self.model else self._counted(), self.out)
        description.show("model", str(self.out), console)
        print_line(console, f"written to {self.out}")
        return 0

    def _counted(self) -> "ModelProfile":
        from polyrhythm.describe.profiles import builtin_profile, layers_of

        layers_of(self.model)  # refuses an unknown one first
        if self.flops is None:
            raise DescriptionError(
                f"{self.model} without --flops",
                expected="the operations per second of the device that is to be of speed 1",
                fix="add --flops 6e13 or whatever it does; `polyrhythm probe` measures it",
            )
        return builtin_profile(
            self.model,
            flops=self.flops,
            microbatch_size=self.sizes[0] if self.sizes else 1,
            other_sizes=self.sizes[1:],
            dtype=self.dtype or "float32",
        )

    def _measured(self, console: "Console") -> "ModelProfile":
        from datetime import UTC, datetime

        from polyrhythm.run.profile.profile import measure_profile
        from polyrhythm.tables import print_line

        notes: list[str] = []
        with console.status("measuring") as status:
            profile = measure_profile(
                self.model,
                sizes=self.sizes,
                repeat=self.repeat,
                device=self.device,
                dtype=self.dtype,
                measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
                say=lambda text: status.update(f"measuring {text}"),
                warn=notes.append,
            )
        for text in notes:
            print_line(console, text)
        return profile

    def _check(self) -> None:
        from polyrhythm.describe.model import MAX_SAMPLES

        if not 1 <= self.repeat <= 1000:
            raise DescriptionError(
                f"--repeat {self.repeat}",
                expected="1 to 1000",
                fix=f"leave --repeat out for {_REPEAT}",
            )
        if ":" not in self.model and (self.repeat != _REPEAT or self.device != "auto"):
            given = f"--repeat {self.repeat}" if self.repeat != _REPEAT else "--device"
            raise DescriptionError(
                f"{given} for {self.model}, of which nothing is measured",
                expected="--repeat and --device with module:factory only",
                fix=f"leave {given.split()[0]} out, or name a module and a function in it",
            )
        sizes = self.sizes or (1,)
        repeated = len(set(sizes)) < len(sizes)
        if min(sizes) < 1 or max(sizes) > MAX_SAMPLES or repeated:
            raise DescriptionError(
                f"--sizes {' '.join(map(str, sizes))}",
                expected=f"numbers of samples, 1 to {MAX_SAMPLES}, each once",
                fix="write them like --sizes 8 4 2 1",
            )
        if self.flops is not None and ":" in self.model:
            raise DescriptionError(
                f"--flops {self.flops:g} for {self.model}, which is measured",
                expected="--flops with a model that comes along",
                fix="leave --flops out",
            )

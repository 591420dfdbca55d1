"""`polyrhythm profile`: write a model's profile, with times and bytes per layer."""

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
    """Measure the layers of a torch model, or compute those of a built-in model.

    The factory returns the model (an nn.Sequential, or a list of layers) and an example input:
    polyrhythm profile my_model.py:build -o profile.json

    A Hugging Face model by its config: polyrhythm profile gpt2,n_layer=4,sequence=128
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """file.py:factory or module:factory of a model to measure; or a Hugging Face model, by type
    (gpt2, llama) or folder with a config.json, and changed values of its config; or a built-in
    model, with --flops: bert-base, bert-large, resnet50, or gpt-24x2048x2048 for 24 layers, a width
    of 2048 and 2048 tokens."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("profile.json")
    """The profile to write, .json or .toml."""
    sizes: tuple[int, ...] = ()
    """Micro-batch sizes in samples; the first is the profile's main size. By default the size of
    the example input, then half, a quarter, and one."""
    repeat: int = _REPEAT
    """Number of runs; the profile has their median."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure on: auto uses a GPU if there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Convert the model to this dtype; by default it stays as the factory made it. For a built-in
    model: its dtype, by default float32."""
    autocast: Literal["bfloat16", "float16"] | None = None
    """Compute in this dtype under torch.autocast; weights and gradients keep theirs."""
    flops: float | None = None
    """For a built-in model: operations per second of the device, such as 6e13. A Hugging Face model
    is then counted, not measured, and needs no memory."""

    def run(self, console: "Console") -> int:
        from polyrhythm.describe.write import check_target, write_model
        from polyrhythm.observe import description
        from polyrhythm.tables import print_line

        self._check()
        check_target(self.out, (".json", ".toml"))
        write_model(self._measured(console) if self._is_measured else self._counted(), self.out)
        description.show("model", str(self.out), console)
        print_line(console, f"written to {self.out}")
        return 0

    @property
    def _is_measured(self) -> bool:
        from polyrhythm.describe.profiles import is_builtin

        is_factory = ":" in self.model
        return is_factory or (self.flops is None and not is_builtin(self.model))

    def _counted(self) -> "ModelProfile":
        from polyrhythm.describe.profiles import builtin_profile, is_builtin

        if self.flops is not None and not is_builtin(self.model):
            from polyrhythm.run.profile.profile import count_profile

            dtype = self.dtype or "float32"
            return count_profile(self.model, flops=self.flops, sizes=self.sizes, dtype=dtype)
        if self.flops is None:
            raise DescriptionError(
                f"{self.model} without --flops",
                expected="the operations per second of a device of speed 1",
                fix="add --flops, such as --flops 6e13; `polyrhythm probe` measures it",
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
                autocast=self.autocast,
                measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
                on_progress=lambda text: status.update(f"measuring {text}"),
                warn=notes.append,
            )
        for text in notes:
            print_line(console, text)
        return profile

    def _check(self) -> None:
        from polyrhythm.describe.model import MAX_SAMPLES

        if not 1 <= self.repeat <= 1000:
            raise DescriptionError(
                f"--repeat {self.repeat}", expected="1 to 1000", fix=f"omit --repeat for {_REPEAT}"
            )
        options = {
            f"--repeat {self.repeat}": self.repeat != _REPEAT,
            "--device": self.device != "auto",
            "--autocast": self.autocast is not None,
        }
        if not self._is_measured and any(options.values()):
            option = next(name for name, is_given in options.items() if is_given)
            raise DescriptionError(
                f"{option} for {self.model}, which is computed, not measured",
                expected="--repeat, --device and --autocast only for a model that is measured",
                fix=f"leave {option.split()[0]} out, or pass file.py:factory",
            )
        sizes = self.sizes or (1,)
        repeated = len(set(sizes)) < len(sizes)
        if min(sizes) < 1 or max(sizes) > MAX_SAMPLES or repeated:
            raise DescriptionError(
                f"--sizes {' '.join(map(str, sizes))}",
                expected=f"numbers of samples, 1 to {MAX_SAMPLES}, each once",
                fix="for example --sizes 8 4 2 1",
            )
        if self.flops is not None and ":" in self.model:
            raise DescriptionError(
                f"--flops {self.flops:g} for {self.model}, which is measured",
                expected="--flops only with a built-in or a Hugging Face model",
                fix="leave --flops out",
            )

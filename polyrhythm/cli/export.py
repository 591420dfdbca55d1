"""`polyrhythm export RUN`: the model of a run as safetensors, for whoever has no Polyrhythm."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCommand:
    """Write the whole model of a checkpoint as safetensors, in Hugging Face's layout.

    One model.safetensors, or several and an index above 5 GB; with config.json where the model came
    from transformers, whose from_pretrained then loads the folder. Needs no GPU and no job.
    """

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's folder, or a folder of checkpoints, or one checkpoint."""
    step: int | None = None
    """Which checkpoint; by default the latest that is whole."""
    out: Path | None = None
    """The folder to write, which must be new or empty; by default RUN/export/step-NNNNNNNN."""

    def run(self, console: "Console") -> int:
        from polyrhythm.run.checkpoint.export import export
        from polyrhythm.run.checkpoint.folder import find_checkpoint

        checkpoint = find_checkpoint(self.run_folder, self.step)
        out = self.out or self.run_folder / "export" / checkpoint.name
        export(checkpoint, out)
        for path in sorted(out.iterdir()):
            console.print(f"{path}  {path.stat().st_size:,} bytes", soft_wrap=True)
        return 0

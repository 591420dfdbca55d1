"""`polyrhythm export RUN`: write a run's model as safetensors, for use without Polyrhythm."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCommand:
    """Write the whole model of a checkpoint as safetensors, in Hugging Face's layout.

    Writes one model.safetensors, or several and an index above 5 GB. A model from transformers also
    gets its config.json, so that from_pretrained loads the folder. Needs no GPU and no running job.
    """

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run's folder, a folder of checkpoints, or one checkpoint."""
    step: int | None = None
    """Step of the checkpoint; by default the latest complete one."""
    out: Path | None = None
    """Target folder, new or empty; by default RUN/export/step-NNNNNNNN."""

    def run(self, console: "Console") -> int:
        from polyrhythm.run.checkpoint.export import export
        from polyrhythm.run.checkpoint.folder import find_checkpoint

        checkpoint = find_checkpoint(self.run_folder, self.step)
        out = self.out or self.run_folder / "export" / checkpoint.name
        export(checkpoint, out)
        for path in sorted(out.iterdir()):
            console.print(f"{path}  {path.stat().st_size:,} bytes", soft_wrap=True)
        return 0

"""`polyrhythm doctor` and `polyrhythm show`: check this machine, and check a description."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tyro

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class Doctor:
    """Check this machine for training and the lab, and print how to install what is missing."""

    def run(self, console: "Console") -> int:
        from polyrhythm.lab import abilities
        from polyrhythm.observe import doctor
        from polyrhythm.run import machine

        is_incomplete = doctor.show(
            console,
            training=machine.check_results(),
            lab=abilities.check_results(),
            extras=doctor.extras(),
        )
        return 1 if is_incomplete else 0


@dataclass(frozen=True, slots=True)
class Show:
    """Check a description and print it: a TOML or JSON file, or the name of a bundled one."""

    kind: tyro.conf.Positional[Literal["cluster", "model", "scenario"]]
    """What the file describes."""
    file: tyro.conf.Positional[str]
    """The file, or the name of a bundled description, such as case5_worldwide or sdpipe_b."""
    cluster: str | None = None
    """For a scenario: check that this cluster has all devices and links that it names."""

    def run(self, console: "Console") -> int:
        from polyrhythm.observe import description

        description.show(self.kind, self.file, console, cluster=self.cluster)
        return 0

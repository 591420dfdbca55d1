"""The command `polyrhythm`: parse arguments, run the subcommand, map errors to exit statuses.

0: success; 1: failure at run time; 2: an error that the user can fix; 130: interrupted; 143:
terminated. Commands import heavy modules when they run, so that --help stays fast.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from polyrhythm import __version__
from polyrhythm.cli.coordinator import CoordinatorCommand, KeysCommand
from polyrhythm.cli.demo import Demo
from polyrhythm.cli.lab import LabCommand
from polyrhythm.cli.leave import LeaveCommand
from polyrhythm.cli.plan import PlanCommand
from polyrhythm.cli.probe import Doctor, Probe, Show
from polyrhythm.cli.profile import Profile
from polyrhythm.cli.replay import ReplayCommand
from polyrhythm.cli.report import ExportCommand, ReportCommand
from polyrhythm.cli.simulate import SimulateCommand
from polyrhythm.cli.source_tree import Bench, ReproduceCommand
from polyrhythm.cli.train import TrainCommand
from polyrhythm.errors import PeerError, UserError, WorkerError
from polyrhythm.processes import BAD_INPUT, FAILED_ALONE

Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Probe, tyro.conf.subcommand("probe")]
    | Annotated[Profile, tyro.conf.subcommand("profile")]
    | Annotated[PlanCommand, tyro.conf.subcommand("plan")]
    | Annotated[SimulateCommand, tyro.conf.subcommand("simulate")]
    | Annotated[TrainCommand, tyro.conf.subcommand("train")]
    | Annotated[LeaveCommand, tyro.conf.subcommand("leave")]
    | Annotated[LabCommand, tyro.conf.subcommand("lab")]
    | Annotated[ReportCommand, tyro.conf.subcommand("report")]
    | Annotated[ReplayCommand, tyro.conf.subcommand("replay")]
    | Annotated[ExportCommand, tyro.conf.subcommand("export")]
    | Annotated[CoordinatorCommand, tyro.conf.subcommand("coordinator")]
    | Annotated[KeysCommand, tyro.conf.subcommand("keys")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[ReproduceCommand, tyro.conf.subcommand("reproduce")]
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command as the console entry point and exit with its status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(f"polyrhythm {__version__}")
        sys.exit(0)
    try:
        command: Command = tyro.cli(
            Command,
            prog="polyrhythm",
            args=arguments,
            description="Train one PyTorch model on machines of unequal and changing speed. "
            "(--version)",
        )
        from rich.console import Console

        sys.exit(command.run(Console()))
    except UserError as error:
        status, message = 2, str(error)
    except WorkerError as error:
        status, message = (2 if error.status in (BAD_INPUT, FAILED_ALONE) else 1), str(error)
    except (PeerError, OSError) as error:  # for example, a full disk or a removed folder
        status, message = 1, str(error)
    except KeyboardInterrupt:
        status, message = 130, "interrupted"
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)

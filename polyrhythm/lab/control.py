"""Send commands to the switch of a running lab, from its owner or any process of the same user."""

import contextlib
import fcntl
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyrhythm.errors import LabError
from polyrhythm.lab.commands import AnySwitchCommand, CommandReply, decode_reply, encode
from polyrhythm.types import Seconds

TIMEOUT: Seconds = 20.0  # the switch replies within a millisecond unless the machine is overloaded
# The sockets of this user's labs. Computed at import: in a user namespace the user id becomes 0.
FOLDER = Path(tempfile.gettempdir()) / f"polyrhythm-labs-{os.getuid()}"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")


def running_labs() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.sock") if _is_running(path))


def socket_path(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise LabError(
            f"lab name {name!r}",
            expected="up to 40 letters, digits, dots, dashes or underscores",
            fix="choose another name",
        )
    return FOLDER / f"{name}.sock"


def claim(name: str) -> socket.socket:
    """Listen under this name; raise LabError if a running lab has it."""
    path = socket_path(name)
    with _locked_folder():
        if _is_running(path):
            raise LabError(
                f"a lab named {name!r} is running",
                expected="a different name for each lab",
                fix="pass another --name, or end that lab",
            )
        for old in FOLDER.glob("*.sock"):  # left by labs whose processes were all killed at once
            if not _is_running(old):
                old.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(str(path))
            listening.listen()
        except OSError as error:
            listening.close()
            raise LabError(
                f"socket {path}: {error}",
                expected="a path of at most 107 bytes in a writable folder",
                fix="set TMPDIR to a shorter or another folder",
            ) from None
    return listening


@contextmanager
def _locked_folder() -> Iterator[None]:
    """Lock the folder, so that checking a name and listening under it is one atomic step."""
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    if FOLDER.is_symlink() or FOLDER.stat().st_uid != os.geteuid():
        raise LabError(
            f"{FOLDER} belongs to another user",
            expected="a folder of this user",
            fix="remove it, or set TMPDIR to another folder",
        )
    folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _is_running(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TIMEOUT)
        client.connect(str(path))
        return True
    return False


def attach(name: str) -> "Control":
    """Connect to a running lab; raise LabError if none has this name."""
    client = socket.socket(socket.AF_UNIX)
    try:
        client.settimeout(TIMEOUT)
        client.connect(str(socket_path(name)))
    except OSError:
        client.close()
        names = ", ".join(running_labs()) or "none is running"
        raise LabError(
            f"no lab named {name!r}",
            expected=f"the name of a running lab: {names}",
            fix="start it with `polyrhythm lab run`, or correct the name",
        ) from None
    return Control(name, client)


class Control:
    """A connection to a switch, with one command in flight at a time."""

    def __init__(self, name: str, connected: socket.socket) -> None:
        self.name = name
        self._socket = connected
        self._socket.settimeout(TIMEOUT)
        self._lines = self._socket.makefile("rb")

    def request(self, command: AnySwitchCommand) -> CommandReply:
        """Send the command and return its reply; raise LabError if refused or disconnected."""
        try:
            self._socket.sendall(encode(command) + b"\n")
            line = self._lines.readline()
        except OSError as error:
            raise self._lost(str(error)) from None
        if not line:
            raise self._lost("it closed the connection")
        reply = decode_reply(line)
        if reply.refused is not None:
            raise LabError(
                f"the switch refused {command}: {reply.refused}",
                expected="a command that fits this lab",
                fix="use the version of polyrhythm that started the lab",
            )
        return reply

    def _lost(self, why: str) -> LabError:
        return LabError(
            f"the switch of lab {self.name!r} is gone: {why}",
            expected="a switch that runs until the lab ends",
            fix="start the lab again; if it was killed for memory, use fewer hosts",
        )

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

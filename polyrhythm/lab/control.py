"""Talk to the switch of a running lab, from its owner or from any other process of the user."""

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

TIMEOUT: Seconds = 20.0  # the switch answers in a millisecond, unless the machine is overloaded
# Where this user's labs have their sockets. Found at import: in a user namespace one is user 0.
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
    """Listen under this name; refused while another lab has it."""
    path = socket_path(name)
    with _locked_folder():
        if _is_running(path):
            raise LabError(
                f"a lab named {name!r} is running",
                expected="a name of its own for each lab",
                fix="give another --name, or end that lab",
            )
        for old in FOLDER.glob("*.sock"):  # of labs whose every process was killed at once
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
                expected="a path of at most 107 bytes, in a folder that can be written",
                fix="set TMPDIR to a shorter or another folder",
            ) from None
    return listening


@contextmanager
def _locked_folder() -> Iterator[None]:
    """One claim at a time: between looking and listening nobody else may do either."""
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    if FOLDER.is_symlink() or FOLDER.stat().st_uid != os.geteuid():
        raise LabError(
            f"{FOLDER} belongs to somebody else",
            expected="a folder of your own",
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
    """A connection to a running lab, from any process."""
    client = socket.socket(socket.AF_UNIX)
    try:
        client.settimeout(TIMEOUT)
        client.connect(str(socket_path(name)))
    except OSError:
        client.close()
        there = ", ".join(running_labs()) or "none is running"
        raise LabError(
            f"no lab named {name!r}",
            expected=f"the name of a running lab: {there}",
            fix="start it with `polyrhythm lab run`, or correct the name",
        ) from None
    return Control(name, client)


class Control:
    """A connection to a switch; every order is answered before the next."""

    def __init__(self, name: str, connected: socket.socket) -> None:
        self.name = name
        self._socket = connected
        self._socket.settimeout(TIMEOUT)
        self._lines = self._socket.makefile("rb")

    def request(self, command: AnySwitchCommand) -> CommandReply:
        try:
            self._socket.sendall(encode(command) + b"\n")
            line = self._lines.readline()
        except OSError as error:
            raise self._lost(str(error)) from None
        if not line:
            raise self._lost("it closed the connection")
        answer = decode_reply(line)
        if answer.refused is not None:
            raise LabError(
                f"the switch refused {command}: {answer.refused}",
                expected="an order that fits this lab",
                fix="use the version of polyrhythm that started the lab",
            )
        return answer

    def _lost(self, why: str) -> LabError:
        return LabError(
            f"the switch of lab {self.name!r} is gone: {why}",
            expected="it to run as long as the lab",
            fix="start the lab again; if it was killed for memory, use fewer hosts",
        )

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

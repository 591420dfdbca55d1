"""The keys of a job: only a client that has them can use its coordinator.

CURVE (libzmq) encrypts every message and authenticates both sides: workers know the server by its
public key, and the server knows a worker by the client key that all workers of a job share. The
keys are passed in a file that only its owner may read, or through the job's store.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec
import zmq

from polyrhythm.errors import LaunchError


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKeys:
    """Two pairs of CURVE keys, as Z85 text."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    def __post_init__(self) -> None:
        for side in ("server", "client"):
            public, secret = getattr(self, f"{side}_public"), getattr(self, f"{side}_secret")
            if _public_of(secret) != public:
                raise LaunchError(
                    f"the {side}'s keys of a job",
                    expected="a public key of 40 characters (Z85), and its secret key",
                    fix="delete the file: `polyrhythm coordinator` then writes new keys",
                )

    @classmethod
    def new(cls) -> Self:
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(
            server_public=server[0].decode(),
            server_secret=server[1].decode(),
            client_public=client[0].decode(),
            client_secret=client[1].decode(),
        )

    @property
    def text(self) -> str:
        """All keys, including the secret ones, as one line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError) as error:  # never the text: it may hold secrets
            if isinstance(error.__cause__, LaunchError):
                raise error.__cause__ from None
            raise LaunchError(
                f"the keys of a job: {error}",
                expected="four keys as JSON, as `polyrhythm coordinator` writes them",
                fix="copy the file again, or delete it to get new keys",
            ) from None

    def save(self, path: Path) -> None:
        """Write a new file that only its owner can read."""
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise LaunchError(
                f"{path} exists",
                expected="a new file: overwriting would lock out the workers that have these keys",
                fix="use the keys in it, or delete it first",
            ) from None
        except OSError as error:
            raise LaunchError(
                f"{path}: {error.strerror}",
                expected="a folder in which the keys of the job can be written",
                fix="create the folder, or choose another file",
            ) from None
        with os.fdopen(file, "w") as opened:
            opened.write(self.text + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file; refuse one that other users can read."""
        try:
            with path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if mode & 0o077:
                    raise LaunchError(
                        f"{path} has mode {mode:04o}: other users can read it or write to it",
                        expected="mode 0600: a process with the keys can send as any worker",
                        fix=f"chmod 600 {path}; if others may have read it, make new keys",
                    )
                text = file.read()
        except OSError as error:
            raise LaunchError(
                f"{path}: {error.strerror}",
                expected="the key file of the job",
                fix="copy it from the machine of `polyrhythm coordinator`",
            ) from None
        try:
            return cls.parse(text)
        except LaunchError as error:
            raise error.at(str(path)) from None


def _public_of(secret: str) -> str | None:
    try:
        return zmq.curve_public(secret.encode()).decode()
    except (zmq.ZMQError, ValueError):
        return None

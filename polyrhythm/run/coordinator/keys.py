"""The keys of a job: only a client that has them can use its coordinator.

CURVE (libzmq) encrypts every message and authenticates both sides: workers know the server by its
public key, and the server knows the public keys of the workers. Secret keys never leave a process,
except in a file that only its owner may read (`JobKeys`): the job's store has public keys only.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import zmq

from polyrhythm.errors import LaunchError

KEYS_VARIABLE = "POLYRHYTHM_KEYS"  # the environment variable with the path of a key file


class KeyPair(NamedTuple):
    """A pair of CURVE keys, as Z85 text."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> Self:
        return cls(*(key.decode() for key in zmq.curve_keypair()))

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r})"


class ServerKeys(NamedTuple):
    """The keys of a coordinator, and the public keys of the clients that it accepts."""

    pair: KeyPair
    clients: frozenset[str]


class ClientKeys(NamedTuple):
    """The keys of a worker, and the public key of its coordinator."""

    pair: KeyPair
    server: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKeys:
    """The keys of a worker in a job whose first worker hosts the coordinator.

    Workers publish their public keys in the job's store. `trusted` are those that the launcher or a
    key file has given; without them a worker accepts whatever key the store has.
    """

    client: KeyPair
    server: KeyPair  # for the worker that hosts the coordinator
    trusted: frozenset[str] | None

    @classmethod
    def new(cls) -> Self:
        """Make the keys of a worker that nobody has given any."""
        pair = KeyPair.new()
        return cls(client=pair, server=pair, trusted=None)

    @classmethod
    def for_job(cls, num_workers: int) -> list[Self]:
        """Make the keys that a launcher hands to its workers."""
        pairs = [KeyPair.new() for _ in range(num_workers)]
        trusted = frozenset(pair.public for pair in pairs)
        return [cls(client=pair, server=pair, trusted=trusted) for pair in pairs]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the key file of a job."""
        keys = JobKeys.load(path)
        trusted = frozenset([keys.client_public, keys.server_public])
        return cls(client=keys.client_keys.pair, server=keys.server_keys.pair, trusted=trusted)

    def check(self, public: str, owner: str) -> None:
        """Refuse a public key from the store that is not trusted."""
        if self.trusted is not None and public not in self.trusted:
            raise LaunchError(
                f"the key of {owner} in the job's store is not a key of this job",
                expected=f"keys of one launcher, or {KEYS_VARIABLE} with one file in all processes",
                fix="give all processes the same file; if they have it, somebody else writes to "
                "the store of the job",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKeys:
    """The key file of a job: a pair for its coordinator, and one that all its workers share."""

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
                    fix="write a new file: polyrhythm keys FILE",
                )

    @classmethod
    def new(cls) -> Self:
        server, client = KeyPair.new(), KeyPair.new()
        return cls(
            server_public=server.public,
            server_secret=server.secret,
            client_public=client.public,
            client_secret=client.secret,
        )

    @property
    def server_keys(self) -> ServerKeys:
        pair = KeyPair(self.server_public, self.server_secret)
        return ServerKeys(pair, frozenset([self.client_public]))

    @property
    def client_keys(self) -> ClientKeys:
        return ClientKeys(KeyPair(self.client_public, self.client_secret), self.server_public)

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
                expected="four keys as JSON, as `polyrhythm keys` writes them",
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
                fix="write one with `polyrhythm keys`, or copy it from the machine that has it",
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

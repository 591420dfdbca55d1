"""Training text that every machine has: the source code of Python's standard library, in bytes."""

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from polyrhythm.errors import LaunchError
from polyrhythm.types import Bytes

MAX_BYTES = 8_000_000  # enough for a demo, and quick to read


def standard_library(max_bytes: Bytes = MAX_BYTES) -> bytes:
    """Read the standard library's source, without its tests, in a fixed order."""
    folder = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    text = bytearray()
    for path in sorted(folder.rglob("*.py")):
        if skip.isdisjoint(path.relative_to(folder).parts):
            text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise LaunchError(
            f"no Python source under {folder}",
            expected="the standard library as .py files",
            fix="pass another text: --text FILE",
        )
    return bytes(text[:max_bytes])


def read_text(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES)
    except OSError as error:
        raise LaunchError(
            f"text {path}: {error.strerror}",
            expected="a file that can be read",
            fix="check the path, or omit --text to use Python's standard library",
        ) from None


class ByteText(Dataset[tuple[Tensor, Tensor]]):
    """All windows of a text, `context` bytes long; targets are one byte ahead."""

    def __init__(self, text: bytes, *, context: int) -> None:
        if len(text) <= context:
            raise LaunchError(
                f"a text of {len(text)} bytes",
                expected=f"more than the context of {context} bytes",
                fix="use a longer text, or a smaller --context",
            )
        self._text, self._context = torch.frombuffer(bytearray(text), dtype=torch.uint8), context

    def __len__(self) -> int:
        return len(self._text) - self._context

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self._text[start : start + self._context + 1].long()
        return window[:-1], window[1:]

    @property
    def digest(self) -> str:
        """A hash of the text: all workers of a job must learn the same text."""
        return hashlib.sha256(self._text.numpy().tobytes()).hexdigest()[:16]

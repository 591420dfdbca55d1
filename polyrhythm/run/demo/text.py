"""Training text that every machine has: the source code of Python's standard library, in bytes.

Any worker can draw any micro-batch of any step by itself: the first stage of a pipeline draws the
inputs, the last stage the targets, and neither sends them to the other.
"""

import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class ByteText:
    """Draws micro-batches from a text."""

    text: Tensor  # uint8, one dimension
    context: int
    microbatch_size: int
    seed: int

    @classmethod
    def of(cls, text: bytes, *, context: int, microbatch_size: int, seed: int) -> "ByteText":
        if len(text) <= context:
            raise LaunchError(
                f"a text of {len(text)} bytes",
                expected=f"more than the context of {context} bytes",
                fix="use a longer text, or a smaller --context",
            )
        return cls(
            torch.frombuffer(bytearray(text), dtype=torch.uint8), context, microbatch_size, seed
        )

    @property
    def digest(self) -> str:
        """A hash of the text: all workers of a job must draw from the same text."""
        return hashlib.sha256(self.text.numpy().tobytes()).hexdigest()[:16]

    def microbatch(self, *, step: int, pipeline: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets), each microbatch_size x context; targets are one byte ahead."""
        draw = random.Random(f"{self.seed}/{step}/{pipeline}/{microbatch}")
        num_starts = len(self.text) - self.context
        starts = torch.tensor([draw.randrange(num_starts) for _ in range(self.microbatch_size)])
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def batch(self, *, step: int, pipeline: int, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """Return the micro-batches of a step, concatenated."""
        drawn = [
            self.microbatch(step=step, pipeline=pipeline, microbatch=m)
            for m in range(num_microbatches)
        ]
        return torch.cat([inputs for inputs, _ in drawn]), torch.cat([y for _, y in drawn])

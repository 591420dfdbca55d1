"""Real text that every machine has: the source of Python's own standard library, byte by byte.

Any worker can draw any micro-batch of any step by itself: the first stage of a pipeline takes the
inputs, the last one the targets, and nothing is sent between them.
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

MAX_BYTES = 8_000_000  # plenty for a demo, and read in a moment


def standard_library(max_bytes: Bytes = MAX_BYTES) -> bytes:
    """The standard library's source without its tests, in a fixed order, up to `max_bytes` bytes."""
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
            fix="give a text of your own: --text FILE",
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
            fix="check the path, or leave --text out to use Python's own source",
        ) from None


@dataclass(frozen=True)
class ByteText:
    """A text, and how to draw from it."""

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
        """Tells texts apart: all workers of a job must draw from the same."""
        return hashlib.sha256(self.text.numpy().tobytes()).hexdigest()[:16]

    def microbatch(self, *, step: int, pipeline: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets), each micro-batch size x context; targets are one byte ahead."""
        draw = random.Random(f"{self.seed}/{step}/{pipeline}/{microbatch}")
        num_starts = len(self.text) - self.context
        starts = torch.tensor([draw.randrange(num_starts) for _ in range(self.microbatch_size)])
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def batch(self, *, step: int, pipeline: int, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """The micro-batches of a step, one after the other."""
        drawn = [
            self.microbatch(step=step, pipeline=pipeline, microbatch=m)
            for m in range(num_microbatches)
        ]
        return torch.cat([inputs for inputs, _ in drawn]), torch.cat([y for _, y in drawn])

"""The demo: a small byte-level GPT as a list of layers, its text, and its training.

Layer 0 embeds bytes, layers 1 to num_blocks are transformer blocks (pre-norm, arXiv:2002.04745),
the last is the output head. Each layer is initialised from its own seed: the stages that separate
processes build together equal the whole model. The text, which every machine has, is the source
code of Python's standard library.
"""

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from polyrhythm.errors import LaunchError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.store import JobStore, Members, job_store_backend
from polyrhythm.run.demo.job import DemoConfig, DemoJob, GPTShape
from polyrhythm.run.trainer.config import DataConfig
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sync.modes import SyncConfig
from polyrhythm.types import Bytes

NUM_BYTES = 256
MAX_BYTES = 8_000_000  # of text: enough for a demo, and quick to read


class Embedding(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.byte = nn.Embedding(NUM_BYTES, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        nn.init.normal_(self.byte.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        return self.byte(text) + self.position(positions)


class TransformerBlock(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention_in = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(shape.width),
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        return x + self.mlp(x)

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attention_in(x).view(batch, length, 3, self.num_heads, -1).transpose(1, 3)
        query, key, value = heads.unbind(dim=2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))


class Head(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.logits = nn.Linear(shape.width, NUM_BYTES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def build_layers(shape: GPTShape, layers: range, *, seed: int) -> nn.Sequential:
    """Build some layers of the model; the same seed gives the same weights in any process."""
    kinds = [Embedding, *[TransformerBlock] * shape.num_blocks, Head]
    built = []
    with torch.random.fork_rng(devices=[]):
        for layer in layers:
            torch.manual_seed(seed * 100_003 + layer)
            built.append(kinds[layer](shape))
    return nn.Sequential(*built)


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


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


def load_text(settings: DemoConfig) -> ByteText:
    """Load the text; called before workers are forked, so that they share its memory."""
    text = standard_library() if settings.text is None else read_text(settings.text)
    return ByteText(text, context=settings.context)


def train(ctx: DistContext, job: DemoJob, text: ByteText, run_dir: Path | None) -> None:
    """Train as the worker of this rank; rank 0 broadcasts the run folder."""
    settings, plan = job.settings, job.plan
    job.check_processes(ctx.world_size)
    warmup = max(1, settings.steps // 10)
    with ctx.process_group(settings.timeout):
        store = JobStore(
            job_store_backend("polyrhythm/demo", settings.timeout),
            ctx.rank,
            timeout=settings.timeout,
            name_of=lambda rank: str(plan.worker(rank)),
        )
        members = Members(tuple(range(ctx.world_size)))
        fix = "pass the same file as --text on all machines, or use the same Python there"
        store.check_consistent("the text", {"text digest": text.digest}, members, fix=fix)
        folder = store.broadcast_object("the run folder", str(run_dir), members)
        with Trainer(
            lambda: build_layers(
                settings.shape, range(settings.shape.num_layers), seed=settings.seed
            ),
            next_byte_loss,
            lambda parameters: AdamW(parameters, lr=settings.lr),
            text,
            batch_size=settings.batch_size,
            microbatch_size=settings.microbatch_size,
            plan=plan,
            schedule=settings.schedule,
            sync=SyncConfig(settings.sync, options=settings.policy_options),
            lr_schedule=lambda optimizer: LambdaLR(
                optimizer, lambda step: min(1.0, (step + 1) / warmup)
            ),
            data=DataConfig(seed=settings.seed),
            device=_device(settings, ctx),
            run_dir=folder,
            timeout=settings.timeout,
        ) as trainer:
            trainer.fit(max_steps=settings.steps, progress=False)  # `polyrhythm demo` shows its own


def _device(settings: DemoConfig, ctx: DistContext) -> torch.device:
    # In the worker: a process that has initialised CUDA cannot fork workers that use it.
    if settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError(
            "--device cuda on a machine without a usable GPU",
            expected="torch.cuda.is_available()",
            fix="use --device cpu; `polyrhythm doctor` lists what this machine has",
        )
    return torch.device("cuda", ctx.local_rank % torch.cuda.device_count())

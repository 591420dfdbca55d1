"""Two sides that alternate on one GPU: each has its own processes, and one computes at any time.

A side calls its `BlockTimer` before every step. After each block of steps it waits for the GPU,
reports the time of the block, and waits until it may continue. The first step of a block is not
counted: messages that the last one leaves in flight arrive in the pause, for nothing, and those of
the first one do not. Noise of the machine that lasts
longer than a round is the same for both sides, and a ratio is that of one round.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu.model import DEVICE
from benchmarks.gpu.ranks import log_tails
from polyrhythm.describe.measure import finish
from polyrhythm.processes import Child, end_all
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.types import Seconds

_TIMEOUT: Seconds = 150.0  # of a block, which may compile
_NUM_COMPARED = 10  # steps whose losses are compared


Report = tuple[Seconds, list[float]]  # of a block: its time, and the losses since the last report


class BlockTimer:
    """One process's part of it, called before each step."""

    def __init__(self, end: "Connection[Report, str]", block: int, warm_up: int) -> None:
        """`block`: steps between reports; `warm_up`: steps of the first one."""
        self._end, self._block, self._left = end, block, 0
        self._warm_up, self._start, self._is_first = warm_up, 0.0, False
        self._losses: list[torch.Tensor | float] = []

    def __call__(self, *_: object) -> None:
        if self._is_first:  # it has ended
            finish(DEVICE)
            self._start, self._is_first = time.perf_counter(), False
        if self._left == 0:
            self._report()
            self._left = 1 + (self._warm_up or self._block)
            self._warm_up, self._is_first = 0, True
        self._left -= 1

    def add_loss(self, loss: torch.Tensor | float) -> None:
        """Keep the loss of the next step whose loss is known, for the next report."""
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def _report(self) -> None:
        finish(DEVICE)
        if self._start:
            elapsed = time.perf_counter() - self._start
            self._end.send((elapsed, [float(loss) for loss in self._losses]))
            self._losses.clear()
        self._end.recv()


Side = Callable[[DistContext, BlockTimer, int], None]  # context, timer, number of steps to run


class Rounds(NamedTuple):
    """What sides report, by their names."""

    times: dict[str, list[Seconds]]  # of a step, in each round
    losses: dict[str, list[list[float]]]  # of each rank that has losses: those of all steps


def alternate(
    sides: Mapping[str, Side],
    *,
    num_ranks: int = 1,
    block: int,
    num_rounds: int,
    warm_up: int | Mapping[str, int],
) -> Rounds:
    """Run all sides block by block, in changing order; the time of the warm-up is left out."""
    first = {name: warm_up if isinstance(warm_up, int) else warm_up[name] for name in sides}
    ends: dict[str, list[Connection[str, Report]]] = {}
    found = Rounds({name: [] for name in sides}, {name: [[]] * num_ranks for name in sides})
    with tempfile.TemporaryDirectory() as folder:
        children = list[Child]()
        try:
            for name, side in sides.items():
                pairs = [Pipe() for _ in range(num_ranks)]
                ends[name] = [mine for mine, _ in pairs]
                theirs = [end for _, end in pairs]
                # In the last step a side waits until it is ended.
                num_steps = (1 + first[name]) + (1 + block) * num_rounds + 1
                output = Path(folder) / name
                work = partial(_run_side, side, theirs, num_steps, block, first[name], output)
                children.append(Child(work, output=output.with_suffix(".log")))
                for end in theirs:
                    end.close()
            for number in range(1 + num_rounds):  # 0 is the warm-up
                names = list(sides)
                for name in names if number % 2 == 0 else names[::-1]:
                    elapsed, losses = _run_block(name, ends[name])
                    pairs_of_losses = zip(found.losses[name], losses, strict=True)
                    found.losses[name][:] = [a + b for a, b in pairs_of_losses]
                    found.times[name].extend([elapsed / block] if number else [])
        except (EOFError, OSError) as error:  # a TimeoutError is an OSError
            if isinstance(error, EOFError):
                time.sleep(3.0)  # until the side that ends has written why
            logs = log_tails(Path(folder))
            raise RuntimeError(f"a side does not train: {error}\n{logs}") from error
        finally:
            for connection in (end for some in ends.values() for end in some):
                connection.close()
            end_all(children)
    return found


def _run_block(
    name: str, ends: "list[Connection[str, Report]]"
) -> tuple[Seconds, list[list[float]]]:
    """Let a side run a block on all its ranks; return the longest time, and their losses."""
    for end in ends:
        end.send("go")
    reports = list[Report]()
    for end in ends:
        if not end.poll(_TIMEOUT):
            raise TimeoutError(f"{name} takes more than {_TIMEOUT:g} s for a block of steps")
        reports.append(end.recv())
    return max(elapsed for elapsed, _ in reports), [losses for _, losses in reports]


def _run_side(
    side: Side,
    ends: "list[Connection[Report, str]]",
    num_steps: int,
    block: int,
    warm_up: int,
    folder: Path,
) -> None:
    def work(ctx: DistContext) -> None:
        for rank, end in enumerate(ends):
            if rank != ctx.rank:
                end.close()  # the end of another rank closes its pipe
        side(ctx, BlockTimer(ends[ctx.rank], block, warm_up), num_steps)

    with LocalJob(work, len(ends), output_folder=folder) as job:
        for end in ends:
            end.close()
        job.wait(3600.0)


def ratio(rounds: Rounds, other: str, ours: str) -> float:
    """Return the median over rounds of the other side's time over ours: above 1 we are faster."""
    pairs = zip(rounds.times[other], rounds.times[ours], strict=True)
    return statistics.median(a / b for a, b in pairs)


def milliseconds(rounds: Rounds, prefix: str) -> dict[str, float]:
    """Return the median time of a step of each side."""
    return {
        f"{prefix}_{side}_ms": 1e3 * statistics.median(times)
        for side, times in rounds.times.items()
    }


def loss_difference(losses: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """Return the largest relative difference of the losses of the first steps of both sides.

    Only of those: some kernels add in no fixed order, and training amplifies what that changes.
    """
    pairs = [
        pair
        for own, other in zip(losses, others, strict=True)
        for pair in zip(own[:_NUM_COMPARED], other[:_NUM_COMPARED], strict=False)
    ]
    if not pairs:
        raise RuntimeError("the sides have no losses of the same steps")
    return max(abs(a - b) / abs(a) for a, b in pairs)

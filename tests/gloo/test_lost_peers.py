"""All processes report a dead or stopped peer by name and in time, and none hangs."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.errors import PeerError
from polyrhythm.processes import PEER_LOST, wait_for_all
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.pipeline import autotune
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.pipeline.transport import Inbox, MessageLayout, Outbox
from polyrhythm.types import Action, Op
from tests.gloo.transport_peers import receive_and_check, route, send, signal_peer, wait_for_peer
from tests.grids import long_except

FOREVER = 1000.0
TIMEOUT = 4.0
NUM_STAGES = 4


def die() -> None:
    os._exit(0)


def stop_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def peer_error_of(call: Callable[[], object]) -> PeerError:
    with pytest.raises(PeerError) as caught:
        call()
    error = caught.value
    assert f"lost s1p0 during {error.action} after {error.waited:.1f} s: " in str(error)
    return error


def watch(
    watcher: Callable[[DistContext], None], victim: Callable[[DistContext], None], folder: Path
) -> None:
    """Run `watcher` on rank 0 and `victim` on rank 1; `watcher` must finish without an error."""

    def work(ctx: DistContext) -> None:
        with ctx.process_group(30):
            (watcher, victim)[ctx.rank](ctx)
            os._exit(0)

    with LocalJob(work, 2, output_folder=folder) as job:
        status = job._workers[0].wait(45)
        assert status == 0, job._workers[0].reason


def victim_ending_with(ending: Callable[[], None]) -> Callable[[DistContext], None]:
    def victim(ctx: DistContext) -> None:
        route(ctx)
        wait_for_peer(0)
        time.sleep(0.3)  # the other process waits by then
        ending()

    return victim


@pytest.mark.timeout(60)
def test_peer_death_fails_receive_at_once(tmp_path: Path) -> None:
    def watcher(ctx: DistContext) -> None:
        inbox = Inbox(route(ctx, timeout=FOREVER), window=2, announced=True)
        inbox.post_receives([(Action(Op.F, 3), 10)])
        signal_peer(1)
        error = peer_error_of(lambda: inbox.get(Action(Op.F, 3)))
        assert error.action == "receiving F3"
        assert error.waited < FOREVER / 10
        again = peer_error_of(lambda: inbox.get(Action(Op.F, 3)))
        assert again.cause == error.cause

    watch(watcher, victim_ending_with(die), tmp_path)


@pytest.mark.timeout(60)
def test_peer_death_fails_send_at_once(tmp_path: Path) -> None:
    def watcher(ctx: DistContext) -> None:
        outbox = Outbox(route(ctx, timeout=FOREVER), announces=False)
        tensors = [torch.ones(1000)]
        for number in (2, 3):
            outbox.send(Action(Op.B, number), 10, tensors, MessageLayout.of(tensors))
        signal_peer(1)
        error = peer_error_of(outbox.drain)
        assert error.action == "sending B2"
        assert error.waited < FOREVER / 10
        peer_error_of(lambda: outbox.send(Action(Op.B, 4), 10, tensors, MessageLayout.of(tensors)))

    watch(watcher, victim_ending_with(die), tmp_path)


@pytest.mark.timeout(60)
def test_messages_received_before_peer_death_are_usable(tmp_path: Path) -> None:
    def watcher(ctx: DistContext) -> None:
        inbox = Inbox(route(ctx, timeout=FOREVER), window=2, announced=True)
        inbox.post_receives([(Action(Op.F, number), 10) for number in range(3)])
        signal_peer(1)
        wait_for_peer(1)
        time.sleep(0.3)  # it is dead by now
        for number in range(2):
            receive_and_check(inbox, number, 10)
        assert peer_error_of(lambda: inbox.get(Action(Op.F, 2))).action == "receiving F2"

    def victim(ctx: DistContext) -> None:
        outbox = Outbox(route(ctx), announces=True)
        wait_for_peer(0)
        for number in range(2):
            send(outbox, number, 10)
        outbox.drain()
        signal_peer(0)
        die()

    watch(watcher, victim, tmp_path)


@pytest.mark.timeout(60)
def test_stopped_peer_is_lost_after_timeout(tmp_path: Path) -> None:
    def watcher(ctx: DistContext) -> None:
        here = route(ctx, timeout=TIMEOUT)
        inbox = Inbox(here, window=2, announced=True)
        outbox = Outbox(here, announces=False)
        inbox.post_receives([(Action(Op.F, 0), 10)])
        send(outbox, 7, 10)
        signal_peer(1)
        with ThreadPoolExecutor() as both:  # each waits for the whole timeout
            waits = (lambda: inbox.get(Action(Op.F, 0)), outbox.drain)
            receiving, sending = both.map(peer_error_of, waits)
        assert (receiving.action, sending.action) == ("receiving F0", "sending F7")
        for error in (receiving, sending):
            assert error.waited >= TIMEOUT
            assert f"for {TIMEOUT:g} s" in error.cause

    watch(watcher, victim_ending_with(stop_process), tmp_path)


class Trap(nn.Module):
    """Returns its input; calls `ending` at micro-batch 21."""

    def __init__(self, ending: Callable[[], None] | None) -> None:
        super().__init__()
        self._ending, self._num_calls = ending, 0

    def forward(self, x: Tensor) -> Tensor:
        self._num_calls += 1
        if self._ending is not None and self._num_calls == 21:
            self._ending()
        return x


def train(
    ctx: DistContext,
    ending: Callable[[], None] | None,
    *,
    timeout: float,
    schedule: str = "1f1b",
    flush: bool = True,
) -> None:
    """Train until an error; micro-batch 21 is in the middle of a step, after the first ones."""
    batch = torch.ones(6, 8)
    with ctx.process_group(30):
        pipeline = Pipeline(
            nn.Sequential(nn.Linear(8, 8), Trap(ending)),
            loss_fn=functional.mse_loss,
            n_microbatches=6 if flush else 1,
            schedule=schedule,
            flush=flush,
            tune_every=2,
            timeout=timeout,
        )
        while True:
            arguments = [batch] if pipeline.is_first else []
            pipeline.step(*arguments, target=batch)


def endings_of_survivors(
    work: Callable[[DistContext], None], victim: int, timeout: float, folder: Path
) -> dict[int, str]:
    """Return the error of every survivor; they must exit while the victim is not touched."""
    with LocalJob(work, NUM_STAGES, output_folder=folder) as job:
        survivors = {rank: w for rank, w in enumerate(job._workers) if rank != victim}
        assert wait_for_all(list(survivors.values()), timeout), "a survivor hangs"
        for survivor in survivors.values():
            assert survivor.status == PEER_LOST, survivor.reason
        return {rank: survivor.reason for rank, survivor in survivors.items()}


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("victim", "flush"), [(0, True), (2, True), (3, True), (1, False)])
def test_killed_stage_ends_all_other_stages_at_once(
    tmp_path: Path, victim: int, flush: bool
) -> None:
    def be_killed() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work(ctx: DistContext) -> None:
        ending = be_killed if ctx.rank == victim else None
        train(ctx, ending, timeout=FOREVER, flush=flush)

    reasons = endings_of_survivors(work, victim, 45, tmp_path)
    for neighbour in {victim - 1, victim + 1} & reasons.keys():
        assert f"PeerError: lost s{victim}p0 during " in reasons[neighbour]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("victim", "schedule", "flush"),
    long_except([(1, "1f1b", True), (3, "gpipe", True), (2, "1f1b", False)], 0),
)
def test_stopped_stage_ends_all_other_stages_after_timeout(
    tmp_path: Path, victim: int, schedule: str, flush: bool
) -> None:
    def work(ctx: DistContext) -> None:
        ending = stop_process if ctx.rank == victim else None
        train(ctx, ending, timeout=TIMEOUT, schedule=schedule, flush=flush)

    reasons = endings_of_survivors(work, victim, 10 * TIMEOUT, tmp_path)
    assert all("PeerError: lost s" in reason for reason in reasons.values())
    assert any(f"PeerError: lost s{victim}p0 during " in reason for reason in reasons.values())


@pytest.mark.long
@pytest.mark.timeout(90)
def test_stage_stopped_in_clock_exchange_ends_all_other_stages(
    tmp_path: Path,
) -> None:
    def work(ctx: DistContext) -> None:
        if ctx.rank == 2:
            autotune.measure_offsets = lambda connections: stop_process()
        train(ctx, None, timeout=TIMEOUT, schedule="auto")

    reasons = endings_of_survivors(work, 2, 10 * TIMEOUT, tmp_path)
    assert any("comparing clocks" in reason for reason in reasons.values())


@pytest.mark.timeout(60)
def test_stage_exit_between_steps_raises_peer_error(
    tmp_path: Path,
) -> None:
    def work(ctx: DistContext) -> None:
        batch = torch.ones(2, 8)
        with ctx.process_group(30):
            pipeline = Pipeline(
                nn.Linear(8, 8), loss_fn=functional.mse_loss, n_microbatches=2, timeout=FOREVER
            )
            arguments = [batch] if pipeline.is_first else []
            pipeline.step(*arguments, target=batch)
            if pipeline.is_first:
                time.sleep(0.3)
                die()
            pipeline.step(target=batch)

    with LocalJob(work, 2, output_folder=tmp_path) as job:
        survivor = job._workers[1]
        assert survivor.wait(45) == PEER_LOST, survivor.reason
        assert "PeerError: lost s0p0 during waiting for the next step" in survivor.reason

"""Start a job: fork local processes, or read the rank that torchrun gave this process.

Local workers are forked from a parent that has torch loaded: they start in a tenth of a second and
share its memory. The parent owns them: they die with the parent, whatever kills it, and the first
worker that fails ends the job with its error, unless the others can go on without it. The job's
store and membership are served by one more process (`job_coordinator.py`), which is no worker. A
worker runs the same code under both launchers.

Under torchrun a job of several agents, one per machine, goes on without those that are lost. Rank 0
starts the coordinator then; the store of torchrun is used no more once all know its address.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Self

import torch
import torch._dynamo  # every optimizer imports it: before the fork, or 1 s and 100 MB per worker
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from polyrhythm.errors import LaunchError, PeerError, WorkerError, peer_errors
from polyrhythm.processes import (
    BAD_INPUT,
    FAILED_ALONE,
    FENCED,
    INTERRUPTED,
    PEER_LOST,
    TERMINATED,
    Child,
    end_all,
    is_loss,
    wait_for_any,
)
from polyrhythm.run.comm.process_groups import connecting_in_epoch, count_rounds
from polyrhythm.run.comm.store import JobStore, Members
from polyrhythm.run.coordinator.epoch_client import CoordinatorAccess
from polyrhythm.run.coordinator.epoch_server import LossTimeouts
from polyrhythm.run.coordinator.job_coordinator import JobCoordinator, share_detached
from polyrhythm.run.coordinator.keys import KEYS_VARIABLE, WorkerKeys
from polyrhythm.types import Seconds

SURVIVORS_VARIABLE = "POLYRHYTHM_KEEP_SURVIVORS"
_ANY_PORT = 9
_RENDEZVOUS = "polyrhythm/rendezvous {}"
_DEFAULT_ROUTE = "192.0.2.1"  # an address for documentation, which no machine has


@dataclass(frozen=True, slots=True, kw_only=True)
class DistContext:
    """The rank of this process in the job, and how it reaches the other processes.

    Under torchrun a job that keeps its survivors gets its coordinator from `with_coordinator`.
    """

    rank: int
    world_size: int
    local_rank: int
    is_local: bool = False  # our launcher has started it, and serves the store
    store_address: tuple[str, int] | None = None  # local jobs of 2 or more: of their store
    keys: WorkerKeys | None = None  # local jobs: for the connections of workers with each other
    coordinator: CoordinatorAccess | None = None  # of the job's epochs; jobs of 2 or more
    keeps_survivors: bool = False  # the launcher lets the others go on after a loss
    incarnation: int = 0  # the number of processes that have had this rank in the job before
    store: Store | None = None  # the store of the job, after a rendezvous

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self | None:
        """Read the variables that torchrun sets; None if they are not set."""
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return None
        try:
            ctx = cls(
                rank=int(environ["RANK"]),
                world_size=int(environ["WORLD_SIZE"]),
                local_rank=int(environ.get("LOCAL_RANK", environ["RANK"])),
                keeps_survivors=_keeps_survivors(environ),
            )
            int(environ["MASTER_PORT"]), environ["MASTER_ADDR"]  # read by torch, much later
            problem = None if 0 <= ctx.rank < ctx.world_size else "RANK is not below WORLD_SIZE"
        except (KeyError, ValueError) as error:
            problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        if problem is not None:
            raise LaunchError(
                f"RANK and WORLD_SIZE are set, but {problem}",
                expected="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them",
                fix="start with torchrun, or run on this machine alone: unset RANK WORLD_SIZE",
            )
        return ctx

    @classmethod
    def current(cls) -> "DistContext | None":
        """Return the context of this process in a LocalJob or under torchrun; None outside both."""
        return _contexts[-1] if _contexts else cls.from_environment(os.environ)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that torchrun would set in a process of a local job, for its script."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.world_size),
        }

    def with_store(self, timeout: Seconds) -> "DistContext":
        """Run the rendezvous once and keep its store: `process_group` may then be entered twice."""
        with peer_errors("another process of the job", "rendezvous"):
            return replace(self, store=self._get_store(timedelta(seconds=timeout)))

    def with_coordinator(
        self, store: JobStore, members: Members, timeout: Seconds
    ) -> "DistContext":
        """Start a coordinator beside rank 0, and use its store: launchers' stores may be lost.

        All processes call it; `store` is that of the launcher.
        """
        coordinator, address = share_detached(store, members, worker_keys(), _address_for_others)
        with peer_errors("the job's coordinator", "connecting to its store"):
            opened = _open_store(address, timedelta(seconds=timeout))
        return replace(self, store=opened, coordinator=coordinator)

    def with_new_store(self, timeout: Seconds) -> "DistContext":
        """Connect to the store of a coordinator that was started again: it is empty."""
        with peer_errors("the job's coordinator", "connecting to its store"):
            opened = _open_store(self.store_address, timedelta(seconds=timeout))
        return replace(self, store=PrefixStore(_RENDEZVOUS.format(0), opened))

    def with_store_prefix(self, name: str) -> "DistContext":
        """Prefix all keys in the store, so that several process groups can share it."""
        assert self.store is not None, "with_store() comes first"
        return replace(self, store=PrefixStore(name, self.store))

    @contextmanager
    def process_group(
        self,
        timeout: Seconds,
        *,
        rank: int | None = None,
        backend: str = "gloo",
        barrier: Callable[[], object] = dist.barrier,
    ) -> Iterator[None]:
        """Initialise torch.distributed for a `with` block, with `timeout` for every wait.

        `rank` replaces that of the launcher; `backend` is torch's. All leave at a `barrier`, since
        rank 0 may serve the store until none needs it.
        """
        with peer_errors("another process of the job", "joining"), connecting_in_epoch():
            limit = timedelta(seconds=timeout)
            dist.init_process_group(
                backend,
                store=self._get_store(limit),
                rank=self.rank if rank is None else rank,
                world_size=self.world_size,
                timeout=limit,
            )
        yield
        # Not after a failure: a live exception holds the group, and its sockets would stay open.
        try:
            with peer_errors("another process of the job", "the barrier at the end"):
                barrier()
        except PeerError as error:
            # A peer that has left the barrier closes its connections: then all have arrived. A peer
            # that crashed reports its own error. Only a timeout is reported here.
            if "imed out" in error.cause:
                raise
        dist.destroy_process_group()

    def _get_store(self, timeout: timedelta) -> Store:
        """Return the store that all processes of the job share."""
        if self.store is not None:
            return self.store
        if not self.is_local:
            store, _, _ = next(rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
        elif _open_stores:
            store = _open_stores[0]
        else:
            store = _open_store(self.store_address, timeout)
            _open_stores.append(store)
        # A store outlives a rendezvous: keys of an earlier one are stale.
        # A running job, which goes on after losses, had its first one.
        number = 0 if self.incarnation else count_rounds(store, _RENDEZVOUS, self.world_size)
        return PrefixStore(_RENDEZVOUS.format(number), store)


def _open_store(address: tuple[str, int] | None, timeout: timedelta) -> Store:
    """Connect to the store of a local job; serve it in a job of one process."""
    listen_fd = None
    if address is None:
        listen_socket = socket.create_server(("127.0.0.1", 0))
        address, listen_fd = listen_socket.getsockname(), listen_socket.detach()
    host, port = address
    return dist.TCPStore(  # type: ignore[attr-defined]  # public, but not listed as such
        host,
        port,
        is_master=listen_fd is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def _keeps_survivors(environ: Mapping[str, str]) -> bool:
    """Whether torchrun lets the others go on after a loss.

    An agent ends all its workers when one of them fails, and with restarts the agents begin anew
    together. So this is a job of several agents, none of which restarts its workers.
    """
    wanted = environ.get(SURVIVORS_VARIABLE)
    if wanted not in (None, "0", "1"):
        raise LaunchError(
            f"{SURVIVORS_VARIABLE}={wanted}",
            expected="1 if the launcher lets the others go on after a loss, else 0",
            fix=f"unset {SURVIVORS_VARIABLE}: it is known for torchrun",
        )
    if wanted is not None:
        return wanted == "1"
    has_agents = environ.get("GROUP_WORLD_SIZE", "1") != "1"
    return has_agents and environ.get("TORCHELASTIC_MAX_RESTARTS") == "0"


def own_address(name: str) -> str | None:
    """Return this machine's address on its route to `name`, which other machines reach, too.

    A host name may be an alias of the loopback address on its own machine: then the address is that
    of the host name, or on the default route.
    """
    is_on_one_machine = name == "localhost" or name.startswith("127.")
    found = list[str]()
    for target in filter(None, (name, socket.gethostname(), _DEFAULT_ROUTE)):
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((target, _ANY_PORT))  # sends nothing
            found.append(probe.getsockname()[0])
            if is_on_one_machine or not found[-1].startswith("127."):
                return found[-1]
    return found[0] if found else None


def _address_for_others() -> str:
    name = os.environ["MASTER_ADDR"]
    if (address := own_address(name)) is None:
        raise LaunchError(
            f"no address of this machine that other machines reach, and MASTER_ADDR={name}",
            expected="an IPv4 network between the machines of the job",
            fix=f"set MASTER_ADDR to this machine's address; or {SURVIVORS_VARIABLE}=0 in all "
            "processes: then a loss ends the job",
        )
    return address


_open_stores: list[Store] = []  # the store of this process's local job, after its rendezvous
_CAUSE_TIMEOUT: Seconds = 5.0  # until the worker that others have lost exits: slow with a GPU
_LEAVING = {TERMINATED, INTERRUPTED}  # exit statuses after a request to stop
# By exit status: until it is known that others go on without a worker.
_LINE_DELAYS: dict[int, Seconds] = {FAILED_ALONE: 2.0, TERMINATED: 0.5, INTERRUPTED: 0.5}
_STOPPED_STATUSES = {*_LEAVING, PEER_LOST}
_RESTARTED = {FENCED, FAILED_ALONE}  # not those that were asked to leave
RESTART_DELAY: Seconds = 1.0  # by default
_LONGEST_DELAY: Seconds = 60.0  # of a restart
_SHORT_LIFE: Seconds = 60.0  # of a worker that waits longer the next time
_LONGEST_WAIT: Seconds = 0.5  # between two looks at all processes
_MAX_COORDINATOR_ENDS = 5  # in that time: then the job ends
_contexts: list[DistContext] = []  # the context that this process's launcher gave it


def set_context(ctx: DistContext) -> None:
    """Let this process, a new one of our launchers, take part in a job."""
    _contexts.append(ctx)


def worker_keys() -> WorkerKeys:
    """Return the keys from this process's launcher, else from its key file, else its own."""
    if _contexts and (keys := _contexts[-1].keys) is not None:
        return keys
    path = os.environ.get(KEYS_VARIABLE)
    return WorkerKeys.load(Path(path)) if path else _own_keys(os.getpid())


@cache
def _own_keys(_pid: int) -> WorkerKeys:
    """Return the same keys at each call: a coordinator knows them from the first one."""
    return WorkerKeys.new()


class LocalJob:
    """Runs `work(ctx)` in `num_workers` processes of this machine during a `with` block."""

    def __init__(
        self,
        work: Callable[[DistContext], None],
        num_workers: int,
        *,
        output_folder: Path,
        name: Callable[[int], str] = "worker of rank {}".format,
        shown_ranks: Collection[int] = (),
        keeps_survivors: bool = False,
        restart_delay: Seconds | None = None,
        timeouts: LossTimeouts | None = None,
    ) -> None:
        """`name` maps a rank to the worker's name in error messages.

        The ranks in `shown_ranks` inherit this process's output, except for their errors: a
        WorkerError has the first one. The others write to a file each.

        With `keeps_survivors` the job goes on, with a line in stderr, without a worker that a
        signal has ended, that the coordinator has fenced, that has left after its own SIGTERM, or
        that has failed alone (`SingleWorkerError`): it is lost. The job succeeds when all others
        do, and at least one has. Any other failure ends the job: an error of the program is the
        same everywhere. Then the WorkerError is that of the first worker with an error of its own;
        else, if the others have only lost peers, or all are lost, that of the last loss. After
        `request_stop` no loss is accepted.
        After `restart_delay` a worker that is lost is started again, and joins the others, unless
        it was asked to leave; None for never. One that fails then, in any way, is lost again: each
        time soon after its start it waits twice as long, up to a minute.
        `timeouts` are the coordinator's; its events go to `membership.jsonl` of the folder.
        """
        assert keeps_survivors or restart_delay is None, "its first loss ends such a job"
        self._restart_delay, self._incarnations = restart_delay, [0] * num_workers
        self._started_at, self._delays = [0.0] * num_workers, [0.0] * num_workers
        self._restart_at: dict[int, Seconds] = {}  # lost ranks
        self._coordinator_ends = list[Seconds]()  # the last ones
        self._shown_ranks = shown_ranks
        self._work, self._num_workers, self._folder = work, num_workers, output_folder
        self._name, self._keeps_survivors, self._timeouts = name, keeps_survivors, timeouts
        self._workers: list[Child] = []  # by rank, the last one of each
        self._keys: list[WorkerKeys] = []
        self._coordinator: JobCoordinator | None = None
        self._lost: list[int] = []  # ranks, in the order in which their ends were noticed
        self._failures: list[int] = []  # ranks of the other failures, in the same order
        self._lines: list[tuple[Seconds, int, str]] = []  # on lost ranks, and when to show them

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            keys = self._keys = WorkerKeys.for_job(self._num_workers)
            if self._num_workers > 1:
                log = self._folder / "membership.jsonl"
                log.unlink(missing_ok=True)  # of an earlier job
                self._coordinator = JobCoordinator(
                    [worker.client for worker in keys],
                    output=self._folder / "coordinator.log",
                    log=log if self._keeps_survivors else None,
                    timeouts=self._timeouts,
                )
            for rank in range(self._num_workers):
                self._workers.append(self._start(rank))
        except BaseException:  # Ctrl-C, or the limit of processes is reached
            self._end()
            raise
        return self

    def _start(self, rank: int) -> Child:
        keys, incarnation = self._keys[rank], self._incarnations[rank]
        ctx = DistContext(
            rank=rank,
            world_size=self._num_workers,
            local_rank=rank,
            is_local=True,
            keys=keys,
            keeps_survivors=self._keeps_survivors,
            incarnation=incarnation,
        )
        if self._coordinator is not None:
            ctx = replace(
                ctx,
                store_address=self._coordinator.store_address,
                coordinator=self._coordinator.access(keys.client),
            )
        name = f"rank{rank}.{incarnation}.log" if incarnation else f"rank{rank}.log"
        output = None if rank in self._shown_ranks else self._folder / name
        work, keeps_failure = partial(_run, self._work, ctx), bool(self._shown_ranks)
        self._started_at[rank] = time.monotonic()
        return Child(work, output=output, keeps_failure=keeps_failure)

    def request_stop(self, notice: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to every worker, which may then save a checkpoint: call `wait` next."""
        self._keeps_survivors, self._restart_delay = False, None
        self._restart_at.clear()
        for worker in self._workers:
            if worker.status is None:
                os.kill(worker.pid, notice)

    def wait(self, timeout: Seconds) -> bool:
        """Wait up to `timeout`; True when all workers have succeeded. Raises WorkerError.

        Workers that are lost need not have: see `keeps_survivors`.
        """
        deadline = time.monotonic() + timeout
        try:
            while any(worker.status is None for worker in self._workers):
                self._raise_failure()
                if time.monotonic() >= deadline:
                    break
                self._show_due_lines()
                self._restart_due()
                self._restart_coordinator()
                # An end that was seen since `_raise_failure` wakes nobody.
                due = [*(at for at, *_ in self._lines), *self._restart_at.values(), deadline]
                due.append(time.monotonic() + _LONGEST_WAIT)
                wait_for_any(self._children(), min(due) - time.monotonic())
            self._raise_failure()
        except WorkerError as error:
            self._print_lines([each for each in self._lines if each[1] != error.rank])
            raise
        self._show_due_lines()
        ended = [worker for rank, worker in enumerate(self._workers) if rank not in self._lost]
        return all(worker.status == 0 for worker in ended)

    def _raise_failure(self) -> None:
        """Raise the error of the worker that failed, not of the workers that lost it as a peer.

        Those may exit first: the connections of a dying process close before it can be reaped.
        Workers that were asked to stop may be saving: wait until all of them have exited.
        """
        deadline = time.monotonic() + _CAUSE_TIMEOUT
        while True:
            # Read before the failures: a worker that exits in between is waited for.
            is_any_running = any(worker.status is None for worker in self._workers)
            failed = self._failed()
            remaining = deadline - time.monotonic()
            is_cause_unknown = failed and all(map(self._may_follow_another, failed))
            if not (is_cause_unknown and is_any_running and remaining > 0):
                break
            wait_for_any(self._workers, remaining)
        if is_cause_unknown:
            self._raise_cause(failed)
        statuses = {*failed.values()}
        is_leaving = bool(_LEAVING & statuses) and not statuses - _STOPPED_STATUSES
        if failed and not (is_leaving and is_any_running):
            if self._follow_the_last_loss(failed):
                raise self._error_of_last_lost()
            rank = min(failed, key=lambda rank: (*self._doubts(rank), self._order(rank)))
            raise self._error(rank, failed[rank])

    def _failed(self) -> dict[int, int]:
        """Return the statuses of the workers that have failed; accept the losses among them."""
        failed = {
            rank: worker.status
            for rank, worker in enumerate(self._workers)
            if worker.status and rank not in self._lost
        }
        if self._keeps_survivors:
            lost = (r for r, status in failed.items() if is_loss(status) or self._incarnations[r])
            for rank in [*lost]:
                self._accept_loss(rank)
                del failed[rank]
            if len(self._lost) == self._num_workers:
                raise self._error_of_last_lost()
        self._failures += [rank for rank in failed if rank not in self._failures]
        return failed

    def _accept_loss(self, rank: int) -> None:
        self._lost.append(rank)
        worker, reason = self._workers[rank], self._reason(rank)
        if self._coordinator is not None:
            why, incarnation = f"it {reason.splitlines()[0]}", self._incarnations[rank]
            self._coordinator.report_exit(rank, why, incarnation=incarnation)
        worker.signal(signal.SIGKILL)  # the processes that it has started
        if any(other.status is None for other in self._workers):
            first, *rest = reason.splitlines()
            line = f"{self._name(rank)} {first}: the others go on{self._output_of_others(rank)}"
            line += self._plan_restart(rank)
            # An error is shown once: here, or at the end of a job that cannot go on without it. Of
            # a worker that leaves at the end of a job, or with all others, nothing is to be said.
            delay = _LINE_DELAYS.get(worker.status or 0, 0.0)
            self._lines.append((time.monotonic() + delay, rank, "\n".join([line, *rest])))
            self._show_due_lines()

    def _plan_restart(self, rank: int) -> str:
        """Start a lost worker again, after a while; return what to say of it."""
        status = self._workers[rank].status or 0
        first = self._restart_delay
        has_lost_others = status == PEER_LOST and self._incarnations[rank] > 0  # as it joined
        if first is None or not (status < 0 or status in _RESTARTED or has_lost_others):
            return ""
        was_short = time.monotonic() - self._started_at[rank] < _SHORT_LIFE
        delay = min(_LONGEST_DELAY, 2 * self._delays[rank]) if was_short else 0.0
        self._delays[rank] = max(delay, first)
        self._restart_at[rank] = time.monotonic() + self._delays[rank]
        return f"; it is started again in {self._delays[rank]:g} s"

    def _restart_coordinator(self) -> None:
        """Start the coordinator again if it has ended, while workers need it."""
        coordinator, now = self._coordinator, time.monotonic()
        if coordinator is None or coordinator.process.status is None:
            return
        is_needed = any(worker.status is None for worker in self._workers)
        recent = [at for at in self._coordinator_ends if now - at < _SHORT_LIFE]
        if not (is_needed and coordinator.can_restart and len(recent) < _MAX_COORDINATOR_ENDS):
            return
        self._coordinator_ends = [*recent, now]
        line = f"the job's coordinator {coordinator.process.reason}: it is started again"
        print(line, file=sys.stderr, flush=True)
        coordinator.restart()
        for rank, worker in enumerate(self._workers):  # which its log may lack
            if worker.status is not None:
                why, incarnation = f"it {worker.reason}", self._incarnations[rank]
                coordinator.report_exit(rank, why.splitlines()[0], incarnation=incarnation)

    def _restart_due(self) -> None:
        now = time.monotonic()
        for rank in [rank for rank, at in self._restart_at.items() if at <= now]:
            if self._restart_at.pop(rank, None) is None:  # a stop was requested meanwhile
                continue
            self._incarnations[rank] += 1
            self._lost.remove(rank)
            self._workers[rank] = self._start(rank)

    def _show_due_lines(self) -> None:
        """Show lines on losses that are due, and all that are left when the job is over."""
        now, is_over = time.monotonic(), all(worker.status is not None for worker in self._workers)
        due = [each for each in self._lines if each[0] <= now or is_over]
        self._lines = [each for each in self._lines if each not in due]
        leaving = [each for each in due if self._workers[each[1]].status in _LEAVING]
        self._print_lines([each for each in due if not (is_over and each in leaving)])

    def _print_lines(self, lines: list[tuple[Seconds, int, str]]) -> None:
        for _, _, line in lines:
            print(line, file=sys.stderr, flush=True)

    def _output_of_others(self, lost: int) -> str:
        """Say where output still goes when no worker is left whose output is shown."""
        is_shown = any(self._workers[rank].status is None for rank in self._shown_ranks)
        if lost not in self._shown_ranks or is_shown:
            return ""
        return f"; their output is in {self._folder / 'rank*.log'}"

    def _raise_cause(self, failed: Collection[int]) -> None:
        """Raise the cause of workers that have only lost another process, if it is known.

        The others may have survived all losses but the last one. A refusal after losses is the
        worker's own error: it is the cause itself.
        """
        if self._lost and any(self._workers[rank].status != PEER_LOST for rank in failed):
            return
        process = None if self._coordinator is None else self._coordinator.process
        if process is not None and process.status is not None:
            raise WorkerError(
                -1,
                "the job's coordinator",
                process.reason,
                status=process.status,
                output=str(process.output) if _has_output(process) else None,
            )
        if self._lost:
            raise self._error_of_last_lost()

    def _follow_the_last_loss(self, failed: Collection[int]) -> bool:
        """Whether workers cannot go on since the last lost one has failed: it says what to do."""
        last = self._workers[self._lost[-1]].status if self._lost else None
        return last == FAILED_ALONE and all(
            self._workers[rank].status == BAD_INPUT and not self._workers[rank].failure.traceback
            for rank in failed
        )

    def _may_follow_another(self, rank: int) -> bool:
        """Whether a failed worker may report another's failure: a lost peer, or a copied error."""
        is_lost_peer, has_no_traceback = self._doubts(rank)
        is_refusal = self._workers[rank].status == BAD_INPUT
        return is_lost_peer or (is_refusal and has_no_traceback and bool(self._shown_ranks))

    def _doubts(self, rank: int) -> tuple[bool, bool]:
        worker = self._workers[rank]
        return worker.status == PEER_LOST, not worker.failure.traceback

    def _order(self, rank: int) -> int:
        """Of failures after a loss the first one is reported, else that of the lowest rank."""
        return self._failures.index(rank) if self._lost else rank

    def _error_of_last_lost(self) -> WorkerError:
        """Of the last lost worker, if any one that has not left."""
        ended = [rank for rank in self._lost if self._workers[rank].status not in _LEAVING]
        rank = (ended or self._lost)[-1]
        status = self._workers[rank].status
        assert status is not None, "it has ended"
        return self._error(rank, status)

    def _error(self, rank: int, status: int) -> WorkerError:
        worker, reason = self._workers[rank], self._reason(rank)
        if self._lost and rank not in self._lost and worker.status == BAD_INPUT:
            last = self._lost[-1]
            reason = f"cannot go on: {reason.removeprefix('refused: ')}\n  after the last loss: "
            reason += f"{self._name(last)} {self._reason(last).splitlines()[0]}"
        return WorkerError(
            rank,
            self._name(rank),
            reason,
            status=status,
            output=str(worker.output) if _has_output(worker) else None,
            traceback=worker.failure.traceback,
        )

    def _reason(self, rank: int) -> str:
        worker = self._workers[rank]
        has_left = rank in self._lost and worker.status in _LEAVING
        return "has left" if has_left else worker.reason

    def __exit__(self, *_: object) -> None:
        self._end()
        for child in self._children():
            if child.output and child.output.exists() and not child.output.stat().st_size:
                child.output.unlink()  # leave no empty files

    def _end(self) -> None:
        end_all(self._children())
        if self._coordinator is not None:
            self._coordinator.close()

    def _children(self) -> list[Child]:
        coordinator = [] if self._coordinator is None else [self._coordinator.process]
        return [*self._workers, *coordinator]


def _has_output(child: Child) -> bool:
    return child.output is not None and child.output.stat().st_size > 0


def _run(work: Callable[[DistContext], None], ctx: DistContext) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    if "OMP_NUM_THREADS" not in os.environ:
        num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        torch.set_num_threads(max(1, num_cores // ctx.world_size))
    set_context(ctx)
    work(ctx)

"""A job whose workers may be lost: this process's part in its epochs.

An epoch is a job of a fixed size: its workers connect, and train as if they were all. When it ends,
each process leaves all its connections and joins the next epoch with those that are left, in which
it may be another worker, or a spare (`plan/survivors.py`). All reach the same assignment, from the
same members. In lockstep all have made the same steps then, since a step counts when all workers
have voted for it (`sync/epochs.py`). In groups the pipelines that are whole end their step, and
average once more, before they join the next epoch: their weights are equal then, and the scheduler
of groups, which no worker hosts, knows which samples are used.

If processes would be spares, the layers may be divided anew, over all that are left
(`division.py`): in an epoch of its own, in which all members commit the new plan once, no steps.

A member is a process, under the rank that it has in the plan with which the job began.

A process may join in the place of a member that is gone. What the job has begun with is recorded in
its store (`job_record.py`); how it goes on, the others tell it in its first epoch, before which it
has no state.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NoReturn, cast

import msgspec
from msgspec import structs
from torch.distributed.distributed_c10d import Store

from polyrhythm.errors import PeerError, TrainingError, peer_errors
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.survivors import (
    Assignment,
    assign_survivors,
    first_assignment,
    missing_stages,
)
from polyrhythm.processes import FencedError
from polyrhythm.run.comm.epoch import Epoch, GroupHosting, enter_epoch
from polyrhythm.run.comm.launch import DistContext, own_address
from polyrhythm.run.comm.process_groups import DEFAULT_TIMEOUT, abort, step_timeout
from polyrhythm.run.comm.stalled import unreachable_addresses
from polyrhythm.run.comm.store import JobStore, Members, prefixed
from polyrhythm.run.coordinator.epoch_client import EpochClient
from polyrhythm.run.machine import machine_name
from polyrhythm.run.trainer.job_record import FitRecord, JobRecords
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.sync.epochs import Begin, Committed, Member
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

_logger = logging.getLogger(__name__)
_STATE = "what each process has in memory"
_ASSIGNMENT = "the places of the processes before"
_MAX_FRUITLESS = 5  # epochs one after the other in which no step was completed


NEWCOMER = -1  # in place of the number of a fit: it takes part in that of the others


class ProcessState(msgspec.Struct, frozen=True):
    """What a process has in memory when an epoch begins."""

    fit: int  # the number of its current fit
    step: int  # global steps done
    # Of its stage after that step; a spare has lost it after its first epoch.
    has_state: bool = True
    is_cut: bool = False  # in groups: it has not averaged with all others at the end of the epoch
    samples: SamplerState | None = None  # in groups, of a first stage: which are used
    is_sharded: bool = False  # the optimizer's state
    has_own_optimizer: bool = False  # its optimizer's state differs from that of other replicas
    can_divide: bool = False  # it can make another part of the model
    address: str = ""  # of its machine, for the others


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStart:
    """An epoch that begins, as this process sees it."""

    assignment: Assignment
    worker: Worker | None  # of this process; None for a spare, or if it leaves
    leaves: bool  # it was asked to: it hands over what only it has, and goes
    ctx: DistContext  # with its rank in the epoch
    store: Store  # of the epoch
    states: Mapping[int, ProcessState]  # by member
    holders: tuple[int, ...]  # the members with the same stage as this one, itself among them
    departing: frozenset[int]  # members that were asked to leave

    @property
    def members(self) -> tuple[int, ...]:
        """All members of the epoch, also those that leave."""
        return tuple(self.states)

    @property
    def newcomers(self) -> tuple[int, ...]:
        """The members that do not know how far training is."""
        return tuple(m for m, own in self.states.items() if own.fit == NEWCOMER)

    def job_store(self, name: str, member: int, timeout: Seconds) -> tuple[JobStore, Members]:
        """Connect to the store of the epoch as a member; errors name processes."""
        store = JobStore(
            prefixed(name, self.store), member, timeout=timeout, name_of="process {}".format
        )
        return store, Members(self.members)


def _host_of(address: str) -> str:
    """Return the host of an address like tcp://10.0.0.1:4000."""
    return address.rpartition("/")[2].rpartition(":")[0]


def _ended(why: str) -> PeerError:
    return PeerError("a worker", action="training", waited=0.0, cause=why)


class JobOverError(Exception):
    """The other processes have finished, and do not need this one."""


class EpochOverError(Exception):
    """An epoch has ended while its workers were connecting."""


class ElasticJob:
    num_made: ClassVar[int] = 0  # in this process, which is a member once

    def __init__(
        self, ctx: DistContext, plan: Plan, ranks: Sequence[int], *, timeout: Seconds
    ) -> None:
        """Enroll this process. `ranks` in the plan, by the launcher's rank.

        `timeout` bounds the wait for others that are alive.
        """
        assert ctx.coordinator is not None, "an elastic job has a coordinator"
        ElasticJob.num_made += 1
        assert ctx.store is not None, "the rendezvous comes first"
        self._ctx, self._timeout = ctx, timeout
        self._public_key = ctx.coordinator.keys.server
        self.ranks, self.member = tuple(ranks), ranks[ctx.rank]
        self.records = JobRecords(ctx.store, timeout)
        self._assignment = first_assignment(plan)
        self._epoch, self._num_fruitless, self._num_used = Epoch(), 0, 0
        self._num_commits = 0  # in this epoch; steps may go back, after a restore
        self._has_voted = False  # in this epoch
        self.ends_job = False  # all are asked to leave: the last step is committed
        self._lock = threading.Lock()
        self._end_samples: Callable[[], None] | None = None  # in `draining`
        self._departs_because = ""  # empty: nobody has asked this process to leave
        self.routes_around = False  # averages do not need a link between each two replicas
        self._address = own_address(_host_of(ctx.coordinator.address)) or ""
        self._members_at: dict[str, set[int]] = {}  # by the address of their machine
        self._client = EpochClient(
            ctx.coordinator,
            member=ctx.rank,
            incarnation=ctx.incarnation,
            node=machine_name(),
            on_end=self._on_end,
            unreachable=self._unreachable,
        )

    @property
    def assignment(self) -> Assignment:
        return self._assignment

    def find_fit(self, number: int) -> FitRecord | None:
        """Return the record of a fit, when it has begun; None if the others are in a later one."""
        return self.records.find_fit(number, self._client.check_member)

    def next_epoch(self, why: str, own: ProcessState, *, waits: bool = False) -> EpochStart:
        """Wait for the next epoch; a spare `waits` as long as the others train.

        Raises PeerError if this process is no longer a member, TrainingError if those that are left
        cannot train, and JobOverError.
        """
        while True:
            limit = 2 * max(self._timeout, DEFAULT_TIMEOUT)  # longer than the coordinator waits
            begin = self._client.next_epoch(why, None if waits else limit)
            hosting = GroupHosting(self._host_groups, self._public_key)
            self._epoch = epoch = Epoch(connects_at_once=True, group_hosting=hosting)
            self.routes_around = False  # to begin with, each connects to each
            enter_epoch(epoch)
            if self._client.ended:  # before `_on_end` knew of the new one
                self.end_epoch(self._client.ended)
            self._check_progress(begin, is_new=own.fit == NEWCOMER)
            store, before, start = self._store_of(begin), self._assignment, None
            if own.fit != NEWCOMER:  # also if the epoch ends at once: the next one builds on it
                start = self._start_of(begin, store, is_spare=waits)
            try:
                own = structs.replace(own, address=self._address)
                states = self._exchange_states(store, begin, own)
                self._share_assignment(store, states, before)
            except PeerError as error:  # it has ended already
                why = str(error)
                continue
            start = start or self._start_of(begin, store, is_spare=waits)
            members_at = defaultdict[str, set[int]](set)
            for member, state in states.items():
                members_at[state.address].add(member)
            self._members_at = members_at
            return replace(start, states=states)

    def _store_of(self, begin: Begin) -> Store:
        assert self._ctx.store is not None, "the rendezvous comes first"
        if self._ctx.coordinator is not None and self._ctx.coordinator.is_restarted:
            self._reconnect_store(self._ctx.store)
        assert self._ctx.store is not None, "it was connected again"
        # A connection of its own: on that of an ended epoch a wait of gloo may go on.
        prefix = f"polyrhythm/epoch {begin.epoch}"
        with peer_errors("the process that serves the job's store", "connecting to it"):
            return cast(Store, prefixed(prefix, self._ctx.store).clone())

    def _reconnect_store(self, store: Store) -> None:
        """Connect to the store again if the coordinator was started again, and fill it."""
        try:
            store.check(["polyrhythm/records"])
        except RuntimeError:  # torch's error of a lost connection
            self._ctx = self._ctx.with_new_store(self._timeout)
            assert self._ctx.store is not None, "it was connected"
            self.records = self.records.moved_to(self._ctx.store)

    def _share_assignment(
        self, store: Store, states: Mapping[int, ProcessState], before: Assignment
    ) -> None:
        """Tell newcomers what the others were `before`."""
        newcomers = [member for member, own in states.items() if own.fit == NEWCOMER]
        source = next((member for member in states if member not in newcomers), None)
        if source is None:
            raise TrainingError(
                "no process is left that knows how far training is",
                expected="a process that has trained before those that join",
                fix="restore() the newest checkpoint, or use more pipelines",
            )
        if newcomers and self.member in (source, *newcomers):
            received = self._member_store(store).broadcast_object(
                _ASSIGNMENT, before, Members((source, *newcomers)), as_type=Assignment
            )
            if self.member in newcomers:
                self._assignment = received

    def _member_store(self, store: Store) -> JobStore:
        return JobStore(
            prefixed("members", store),
            self.member,
            timeout=self._timeout,
            name_of="process {}".format,
        )

    def commit(self) -> str:
        """Return when all workers have what their update of the current step needs.

        Not empty: why the epoch ends after that step. Raises PeerError if the epoch has ended; then
        no worker makes the update.
        """
        committed = self._commit(may_end=True)
        departing = {self.ranks[m] for m in committed.departing}
        going_on = [m for m in self._assignment.members if m not in departing]
        self.ends_job = bool(departing) and assign_survivors(self._assignment, going_on) is None
        return committed.why

    def end_fit(self) -> None:
        """Return when all workers have all that a fit needs: a loss after that does not cut it.

        Raises PeerError as `commit`: then none of them has.
        """
        if not self.ends_job:  # then the last step has ended the epoch: no vote is answered
            self._commit(may_end=False)

    def commit_division(self, start: EpochStart, assignment: Assignment) -> None:
        """Return when all members of the epoch can go on with another assignment.

        Raises PeerError if the epoch has ended before: then no member goes on with it.
        """
        self._commit(may_end=False, num_voters=len(start.members))
        self._assignment = assignment

    def _commit(self, *, may_end: bool, num_voters: int | None = None) -> Committed:
        timeout = step_timeout(self._timeout, self._num_commits)
        num_voters = num_voters or len(self._assignment.workers)
        self._has_voted = True
        committed = self._client.commit(self._num_commits, num_voters, timeout, may_end=may_end)
        self._num_commits += 1
        return committed

    @contextmanager
    def draining(self, end_samples: Callable[[], None]) -> Iterator[None]:
        """A block of training in groups, which ends in order although the epoch has ended.

        Another thread calls `end_samples` then. If a worker of the same pipeline is lost, all waits
        of this process end with an error instead. Raises PeerError if the epoch has ended before.
        """
        with self._lock:
            self._end_samples, why = end_samples, self._departs_because
        try:
            self.check()
            self._client.train_in_groups()
            if why:  # it was asked to leave before, when steps had commits, or between two fits
                self._client.depart(why, without_commit=True)
            yield
        finally:
            with self._lock:
                self._end_samples = None

    @property
    def why_ended(self) -> str:
        """Why the current epoch has ended, as the coordinator says; empty if it has not."""
        return self._client.ended

    def check(self) -> None:
        """Raise PeerError if the epoch has ended."""
        if why := self._client.ended:
            raise _ended(why)

    def depart(self, why: str) -> None:
        """Ask to leave after a step, in the next fit if there is none; any thread may call it.

        In groups no step is committed: while they train, the epoch ends soon.
        """
        with self._lock:
            self._departs_because, in_groups = why, self._end_samples is not None
        self._client.depart(why, without_commit=in_groups)

    def report_samples(self, num_used: int) -> None:
        """Report how many samples are used when an epoch begins after groups, which commit nothing.

        All processes report the same number, spares too.
        """
        if num_used != self._num_used:  # the epoch before has completed steps
            self._num_used, self._num_fruitless = num_used, 1

    def finish(self) -> None:
        """Leave for good: no other process needs this one."""
        self._client.finish()
        self._client.close()
        enter_epoch(Epoch())

    def abandon(self) -> None:
        """Leave after a failure: the others see that this process is lost."""
        self._client.close()

    def end_epoch(self, why: str) -> None:
        """End all waits of this process for others."""
        self._epoch.end(_ended(why), abort)

    def _on_end(self, why: str, lost: Collection[Member] | None) -> None:
        is_whole = lost is not None and not self._mates & {self.ranks[m] for m in lost}
        with self._lock:  # until it has returned, the block does not end: what it uses stays open
            if self._end_samples is not None and is_whole:
                self._end_samples()
                return
        self.end_epoch(why)

    def _unreachable(self) -> list[Member]:
        """Return the members without whom this one cannot train, and which it does not reach."""
        if self.member not in self._assignment.workers:  # a spare
            return []
        found = set[int]()
        for address in unreachable_addresses():
            found |= self._members_at.get(address, set())
        workers = self._assignment.workers
        if self.routes_around and (others := found - self._mates):
            self._epoch.report_unreachable({workers[m] for m in others if m in workers})
        found &= self._mates if self.routes_around else workers.keys()
        launched = {rank: number for number, rank in enumerate(self.ranks)}
        return [launched[m] for m in found - {self.member}]

    @property
    def _mates(self) -> set[int]:
        """The members of the same pipeline."""
        workers = self._assignment.workers
        own = workers.get(self.member)
        return {m for m, worker in workers.items() if own and worker.pipeline == own.pipeline}

    def _host_groups(
        self, name: str, setup: Setup, log: Path | None, startup_timeout: Seconds
    ) -> str:
        rank_of = {rank: launched for launched, rank in enumerate(self.ranks)}
        members = {worker: rank_of[m] for m, worker in self._assignment.workers.items()}
        workers = [members[worker] for worker in setup.workers]
        return self._client.host_groups(
            name, setup, workers, log=log, timeout=self._timeout, startup_timeout=startup_timeout
        )

    def _check_progress(self, begin: Begin, *, is_new: bool) -> None:
        """Raise PeerError if epochs go on ending before a step of them is completed.

        An epoch that has lost a member does not count: there are only so many. `is_new`: a newcomer
        knows of no commit.
        """
        is_fruitless = begin.committed is None and not begin.lost
        self._num_fruitless = self._num_fruitless + 1 if is_fruitless else 1
        if self._num_fruitless > _MAX_FRUITLESS:
            raise PeerError(
                "another worker",
                action=f"{_MAX_FRUITLESS} epochs, in which no step was completed",
                waited=0.0,
                cause="see the warnings above for why each has ended",
            )
        num_commits = 0 if begin.committed is None else begin.committed + 1
        is_worker = self.member in self._assignment.workers and not is_new
        has_part = self._has_voted or is_worker
        if has_part and num_commits != self._num_commits:
            cause = "it has committed a step that this process did not learn of"
            raise PeerError("the coordinator", action="training", waited=0.0, cause=cause)
        self._num_commits, self._has_voted = 0, False

    def _start_of(self, begin: Begin, store: Store, *, is_spare: bool) -> EpochStart:
        before = self._assignment
        if self.member not in before.places:
            cause = "the layers are divided anew, without a place for it"
            raise FencedError("the job", action="joining", waited=0.0, cause=cause)
        members = [m for m in (self.ranks[m] for m in begin.members) if m in before.places]
        departing = {self.ranks[m] for m in begin.departing}
        going_on = [member for member in members if member not in departing]
        assignment = assign_survivors(before, going_on)
        if assignment is None and departing:  # without them nobody trains: they save and exit
            assignment, departing = assign_survivors(before, members), set()
            self.ends_job = assignment is not None
        if assignment is None:
            self._raise_over(begin, going_on, is_spare=is_spare)
        self._assignment = assignment
        plan, worker = assignment.plan, assignment.workers.get(self.member)
        places = assignment.places
        own_stage = places[self.member].stage
        return EpochStart(
            assignment=assignment,
            worker=worker,
            leaves=self.member in departing,
            ctx=replace(
                self._ctx,
                store=store,
                rank=-1 if worker is None else plan.rank(worker),
                world_size=plan.num_workers,
            ),
            store=store,
            states={},
            holders=tuple(m for m in members if places[m].stage == own_stage),
            departing=frozenset(departing),
        )

    def _exchange_states(
        self, store: Store, begin: Begin, own: ProcessState
    ) -> dict[int, ProcessState]:
        members = [self.ranks[m] for m in begin.members]
        found = self._member_store(store).all_gather_object(
            _STATE, own, Members(tuple(members)), as_type=ProcessState
        )
        return dict(zip(members, found, strict=True))

    def _raise_over(self, begin: Begin, going_on: Sequence[int], *, is_spare: bool) -> NoReturn:
        before = self._assignment
        present = {self.ranks[m] for m in begin.members}
        lost = {self.ranks[each.member] for each in begin.lost}
        if is_spare and before.workers.keys() - present - lost:
            raise JobOverError
        stages = ", ".join(map(str, missing_stages(before, going_on)))
        causes = "; ".join(f"process {each.member}: {each.why}" for each in begin.lost)
        what = f"nobody has the layers of stage {stages}" if stages else "devices are shared"
        raise TrainingError(
            f"no whole pipeline is left: {what} ({causes or 'others have finished'})",
            expected="a worker for each stage",
            fix="restore() the newest checkpoint with the machines that are left, or use more "
            "pipelines, on different machines",
        )

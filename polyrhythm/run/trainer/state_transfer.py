"""Move training state between the processes of a stage when an epoch begins.

In `decoupled` each replica has a shard of the optimizer's state: those that go on need the shards
of all that do not, spares and workers that leave among them, and of lost ones from their buddies.
In the other lockstep modes each replica has everything; then only a process that becomes a worker
again, after it was a spare, needs the state of another. In groups that of a broken pipeline does.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from msgspec import structs
from torch.distributed.distributed_c10d import PrefixStore

from polyrhythm.errors import TrainingError, peer_errors
from polyrhythm.run.comm.epoch import current_epoch
from polyrhythm.run.comm.process_groups import GlooGroup, gloo_options, set_timeout
from polyrhythm.run.comm.store import JobStore, Members, prefixed
from polyrhythm.run.trainer.elastic import NEWCOMER, EpochStart
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.types import Seconds

_logger = logging.getLogger(__name__)


def settle_groups(
    start: EpochStart, step_of: Callable[[SamplerState], int]
) -> tuple[EpochStart, SamplerState]:
    """Choose whose state counts after an epoch with groups, and which samples are used.

    Workers that have averaged with all others have equal weights. Those of a broken pipeline do
    not count, unless a stage has no others: then the first one counts. Those that have entered a
    mode with shards before the others, and made no step, copy the whole state like a spare.
    """
    places, states = start.assignment.places, start.states
    sources = list[int]()
    for stage in range(start.assignment.first.num_stages):
        held = [m for m, own in states.items() if own.has_state and places[m].stage == stage]
        whole = [m for m in held if not states[m].is_cut]
        if held and not whole:
            _logger.warning("stage %d goes on from process %d, which was cut", stage, held[0])
        sources += [m for m in whole if not states[m].is_sharded] or whole or held[:1]
    found = (states[m].samples for m in sources)
    samples = next((each for each in found if each is not None), None)
    if samples is None:
        raise TrainingError(
            "no first stage is left that knows which samples are used",
            expected="a process that trained with one when a worker was lost",
            fix="restore() the newest checkpoint, or use more pipelines",
        )
    settled = {
        member: structs.replace(own, has_state=member in sources, step=step_of(samples))
        for member, own in states.items()
    }
    return replace(start, states=settled), samples


def check_state(start: EpochStart) -> int:
    """Return how many global steps are done; raises TrainingError if the state is not complete.

    The first thing in an epoch: all processes come to the same result.
    """
    places, states = start.assignment.places, start.states
    with_state = [member for member, own in states.items() if own.has_state]
    steps = {states[member].step for member in with_state}
    if len(steps) > 1:
        found = ", ".join(f"process {m} has made {states[m].step}" for m in with_state)
        raise TrainingError(
            f"processes have made different numbers of steps: {found}",
            expected="the same number, since a step is made by all or by none",
            fix="restore() the newest checkpoint, and report this as a defect",
        )
    fits = {states[member].fit for member in with_state}
    missing = {*range(start.assignment.plan.num_stages)} - {places[m].stage for m in with_state}
    fits.add(NEWCOMER)
    needed = [m for m in start.assignment.workers if states[m].fit not in fits]
    if missing or needed:
        spares = [member for member, own in states.items() if not own.has_state]
        what = f"stages {sorted(missing)}" if missing else f"the places of processes {needed}"
        raise TrainingError(
            f"no process has the weights of {what} after the last step any more"
            + (f": processes {spares} were spares, which do not get them" if spares else ""),
            expected="for each stage a worker that has made the last step",
            fix="restore() the newest checkpoint, or use more pipelines",
        )
    return steps.pop()


def moves_state(start: EpochStart, stage: int, *, is_sharded: bool) -> bool:
    """Return whether the processes that hold a stage move its state."""
    places = start.assignment.places
    needy = (m for m in start.assignment.workers if not start.states[m].has_state)
    return is_sharded or any(places[member].stage == stage for member in needy)


def new_transfer_group(
    start: EpochStart, member: int, holders: Sequence[int], what: str, timeout: Seconds
) -> dist.ProcessGroup:
    """Connect these processes, of which this one is one, to move `what`."""
    store, rank = start.store, holders.index(member)
    name = f"transfer of {what}"
    job_store = JobStore(prefixed(name, store), rank, timeout=timeout)
    # Workers make their pipelines first, spares need not.
    job_store.barrier("to connect", Members(tuple(range(len(holders)))))
    options = gloo_options()
    options._timeout = timedelta(seconds=current_epoch().connect_timeout(timeout))
    with peer_errors("another process", f"the {name}"):
        made: dist.ProcessGroup = GlooGroup(  # type: ignore[assignment]  # same methods
            PrefixStore(name, store), rank, len(holders), options
        )
    current_epoch().add(made)
    set_timeout(made, timeout)
    return made

"""Average gradients and gather updated weights, bucket by bucket.

The reduce-scatter of a bucket starts when backward has filled it and all buckets before it, which
have the same order on all workers: from the last in forward order to the first. Late buckets follow
after backward, if any worker has a gradient for them. After the optimizer step the weights are
gathered in forward order. With all-reduce buckets, the averaged gradients are gathered instead,
still during backward: a plain all-reduce.

In the first backward there are no buckets yet: gradients wait until the order is known.
"""

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.run.comm.comm_thread import CommThread
from polyrhythm.run.comm.process_groups import (
    NUM_SOCKETS,
    Replicas,
    abort,
    connect_all,
    new_gloo_group,
    new_nccl_group,
    set_timeout,
)
from polyrhythm.run.comm.reduce_scatter import (
    CollectivePhase,
    Collectives,
    GlooCollectives,
    HierarchicalCollectives,
    NcclCollectives,
    Pending,
    SingleLevel,
    select_backend,
    site_of,
)
from polyrhythm.run.decoupled.buckets import (
    STRIDED,
    Bucket,
    BucketSpec,
    InFlightGradient,
    ParameterShard,
    has_gradient,
    sparse_error,
)
from polyrhythm.run.pipeline.loss import Count, NonFiniteWarnings, divide_by
from polyrhythm.types import Bytes, Seconds, Worker

_logger = logging.getLogger(__name__)


class ReplicaCollectives:
    """The collectives between replicas, and the thread that waits for them; made by all together.

    If several nodes have equally many workers, two or more, there are hierarchical ones, too.
    """

    def __init__(
        self,
        replicas: Replicas,
        process_group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        site: str | None,
        node: str | None,
        call: str,
        timeout: Seconds,
        worker: Worker | None,
    ) -> None:
        """`process_group` is torch's group of the replicas, if there is one.

        Replicas of one `site` average over NCCL; if there are several, of equally many replicas, it
        is the lower level of a hierarchy. None for gloo, where a `node` is that level. NCCL groups
        are made here, also if `process_group` has NCCL: these may be aborted after a failure.
        `worker`: this one, for errors of others; None without a Pipeline.
        """
        self._device, self._timeout = device, timeout
        node = node or _name_of_this_node()
        own = site_of(site, device, process_group), node, device.type, worker and str(worker)
        found = replicas.all_gather_object(own, call)
        sites, nodes, types, workers = ([each[index] for each in found] for index in range(4))
        names = [f"rank {rank}" for rank in replicas.ranks]
        if worker is not None and len(set(workers)) == len(workers):  # with other `pipeline=`
            names = [f"{each} ({name})" for each, name in zip(workers, names, strict=True)]
        self.control = self._host = GlooCollectives(replicas.group, timeout=timeout, names=names)
        # Where a GPU computes, the host has cores for more threads.
        num_sockets = NUM_SOCKETS if {*types} == {"cuda"} else 1
        self._nccl: dist.ProcessGroup | None = None  # of all replicas
        self._nccl_groups = list[dist.ProcessGroup]()  # of all replicas, or of this site
        self._nodes = None  # members by node or site, if there is a hierarchy
        reach = nccl_reach(sites)
        if reach is NcclReach.ALL:
            self._nccl = self._new_nccl(replicas.ranks)
        else:
            self._nodes = ranks_by_node(nodes if None in sites else sites)
        groups, inside = [replicas.group], None
        # Inside this node and across nodes, if there is a hierarchy.
        self._levels = list[GlooCollectives]()
        if self._nodes is not None:
            own_node = next(members for members in self._nodes if replicas.rank in members)
            local_index = own_node.index(replicas.rank)
            across_nodes = [members[local_index] for members in self._nodes]
            for where, members in (("inside", own_node), ("across", across_nodes)):
                what = f"averaging gradients {where} nodes"
                ranks = [replicas.ranks[member] for member in members]
                made = new_gloo_group(ranks, what, timeout=timeout, num_sockets=num_sockets)
                groups.append(made)
                level = GlooCollectives(
                    made,
                    timeout=timeout,
                    num_sockets=num_sockets,
                    names=[names[member] for member in members],
                )
                self._levels.append(level)
                if where == "inside" and reach is NcclReach.INSIDE_SITES:
                    inside = self._new_nccl(ranks)
        if self._nccl is None and num_sockets > 1:
            what = "averaging gradients over several sockets"
            made = new_gloo_group(replicas.ranks, what, timeout=timeout, num_sockets=num_sockets)
            groups.append(made)
            self._host = GlooCollectives(
                made, timeout=timeout, num_sockets=num_sockets, names=names
            )
        self._nccl_inside = inside
        self._groups = [*groups, *self._nccl_groups]
        self.comm_thread = CommThread(self._groups, timeout=timeout)
        self._single: SingleLevel | None = None
        self._hierarchical: HierarchicalCollectives | None = None
        self._by_owners: GlooCollectives | None = None  # of buddies under a hierarchy
        self._buddy_links: SingleLevel | None = None  # over them

    def _new_nccl(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        made = new_nccl_group(ranks, "averaging gradients over NCCL", timeout=self._timeout)
        assert made is not None, "it is used"
        try:
            connect_all(made, self._device, timeout=self._timeout)
        except PeerError:
            abort(made)
            raise
        self._nccl_groups.append(made)
        return made

    @property
    def has_nccl(self) -> bool:
        return bool(self._nccl_groups)

    def set_timeout(self, timeout: Seconds) -> None:
        """Bound the waits of collectives that start from now on."""
        for group in self._groups:
            set_timeout(group, timeout)
        for collectives in (self.control, self._host, *self._levels, self._by_owners):
            if collectives is not None:
                collectives.timeout = timeout
        self.comm_thread.timeout = timeout

    @property
    def pinned_bytes(self) -> Bytes:
        found = self._single, self._hierarchical, self._buddy_links
        return sum(each.pinned_bytes for each in found if each is not None)

    @property
    def has_hierarchy(self) -> bool:
        return bool(self._levels)

    def shard_owners(self, *, hierarchical: bool) -> list[int] | None:
        """Return the replica that owns each shard; None if they own them in order."""
        if not hierarchical or self._nodes is None:
            return None
        by_local_index = zip(*self._nodes, strict=True)
        return [member for members in by_local_index for member in members]

    def get(self, *, hierarchical: bool) -> Collectives:
        """Return the collectives for the device of the parameters."""
        if not hierarchical:
            return self._get_single()
        if self._hierarchical is None:
            inside, across = self._levels
            self._hierarchical = HierarchicalCollectives(
                self._select(inside, self._nccl_inside), self._select(across)
            )
        return self._hierarchical

    def buddy_links(self, *, hierarchical: bool) -> SingleLevel:
        """Return the collectives that copy shards to buddies: the next shard's owners."""
        if not hierarchical:
            return self._get_single()
        if self._by_owners is None or self._buddy_links is None:
            # Owner and buddy are on two nodes, of which each level connects only some workers.
            self._by_owners = self._host.with_owners(self.shard_owners(hierarchical=True))
            self._buddy_links = self._select(self._by_owners)
        return self._buddy_links

    def _get_single(self) -> SingleLevel:
        if self._single is None:
            self._single = self._select(self._host, self._nccl)
        return self._single

    def _select(self, host: GlooCollectives, nccl: dist.ProcessGroup | None = None) -> SingleLevel:
        return select_backend(self._device, nccl, host, start=self.comm_thread.start)


class GradientPhase(Enum):
    """The state of the gradients since the last step."""

    EMPTY = auto()
    FILLING = auto()  # some are in their buckets
    FINISHED = auto()  # all are averaged


class GradientSync:
    """The collectives of one worker; all workers start them in the same order.

    `tied` are parameters that several stages hold: their gradients are read after backward, without
    a call of `add_gradient`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        tied: Iterable[int],
        replicas: ReplicaCollectives,
        pop_divisor: Callable[[], Count | None],
        name_step: Callable[[], tuple[int, Worker]],
        is_loss_scaled: Callable[[], bool],
        skips_on_device: Callable[[], bool],
    ) -> None:
        """`pop_divisor`: divides this worker's gradients; None if labels are not counted.

        `name_step`: the current step and this worker, for a warning. `is_loss_scaled`: the Trainer
        lowers the scale if gradients are not finite, which needs no warning. `skips_on_device`: the
        optimizer skips a step that is not finite without the host.
        """
        self._parameters, self._names, self._pop_divisor = parameters, names, pop_divisor
        self._name_step, self._warnings = name_step, NonFiniteWarnings()
        self._is_loss_scaled, self._skips_on_device = is_loss_scaled, skips_on_device
        self._tied = [parameters[index] for index in tied]
        self._control, self._comm_thread = replicas.control, replicas.comm_thread
        self._has_nccl = replicas.has_nccl
        self.buckets: list[Bucket] = []
        self.collectives: Collectives  # of the buckets
        self._buddy_links: SingleLevel | None = None  # to copy shards
        self.is_all_reduce = False
        self._bucket_of: dict[int, Bucket] = {}  # by index of a parameter
        self._unbucketed: dict[int, Tensor] = {}  # gradients of the first backward
        self._in_flight = [InFlightGradient(parameter) for parameter in parameters]
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        # A parameter in the optimizer's groups whose gradient is 0, or nan if any worker has a
        # non-finite gradient: a GradScaler then skips the step on all workers, or on none.
        self.found_inf = nn.Parameter(torch.zeros(1, device=parameters[0].device))
        self._set_phase(GradientPhase.EMPTY)
        self.is_paused = False  # gradients accumulate, and are not averaged
        self.is_prepared = False  # all mean gradients are here, and wait for the commit
        # The divisor; for each parameter, whether it has a gradient; whether any is not finite.
        # With NCCL: for each parameter, whether it is trained; whether this worker waits for none.
        num = len(parameters) + 1
        memory = bytearray(8 * (1 + -(-2 * num // 8)))
        self._flags = torch.frombuffer(memory, dtype=torch.uint8)
        self._divisor = self._flags[:8].view(torch.float64)
        # The same memory: setting an element of a tensor takes longer than all else in a hook.
        self._used, self._trained = (memoryview(memory)[8 + i * num :][:num] for i in range(2))
        self._agreed = self._now_trained()  # the trained parameters, as all workers know
        self._weight_gathers: dict[int, Pending] = {}  # by number of bucket
        # Copies of gathered weights to the GPU, by number of bucket, which streams must join.
        self._weight_copies: dict[int, Callable[[], bool]] = {}
        # Buckets in which weights that other workers own may be of two steps: they are arriving.
        self._incomplete = set[int]()
        self._is_unconfirmed = False  # weights of NCCL: not all workers are known to have theirs
        self._weight_error: PeerError | None = None  # of a gather that could not start
        self._unsent: list[Bucket] = []  # buckets still to reduce; the next one is the last
        self._reduce_scatters: list[Pending] = []
        self._all_gathers: list[Pending] = []  # of gradients, in the order of buckets
        self._buddy_copies: list[Pending] = []  # of gradients
        self._sent_flags: Pending | None = None  # of the last step; with NCCL only
        # Whether this worker's gradients were not finite, by step, until the host knows of it.
        self._unread_flags = deque[tuple[torch.cuda.Event, Tensor, int, Worker]]()
        self._was_finite = True  # the last one that was read
        self._sums: list[Tensor] = []  # of the gradients of each bucket that was sent
        self._versions: list[int] = []  # of the parameters when their gather started
        self._waited: Seconds = 0.0  # time for which training waited for other workers
        self._exchange: Seconds = 0.0  # of both collectives, if all workers start at once
        self._last_exchange: Seconds = 0.0  # the one before, for pop_timings
        self._error: PeerError | None = None  # the gradients are unusable after it

    def _set_phase(self, phase: GradientPhase) -> None:
        self._phase = phase
        self._is_filling = phase is GradientPhase.FILLING  # for hooks: an enum takes longer

    @property
    def has_gradients(self) -> bool:
        return self._phase is not GradientPhase.EMPTY or any(map(has_gradient, self._tied))

    @property
    def shards(self) -> Iterator[ParameterShard]:
        """The shards that this worker owns."""
        return (shard for bucket in self.buckets for shard in bucket.shards)

    @property
    def held_shards(self) -> Iterator[ParameterShard]:
        """The own shards, then the copies that this worker holds as a buddy."""
        yield from self.shards
        yield from (shard for bucket in self.buckets for shard in bucket.buddy_shards)

    def weights_of(self, index: int, start: int, stop: int) -> Tensor:
        """View a piece of this worker's copy of a parameter, flat in memory order."""
        bucket = self._bucket_of[index]
        return bucket.weights[bucket.offsets[index] + start : bucket.offsets[index] + stop]

    def held_weights_of(self, shard: ParameterShard) -> Tensor:
        """View the weights after the last update, whether those of other workers have arrived."""
        if not shard.is_own and not self._is_complete(self._bucket_of[shard.index]):
            return shard.parameter.detach()
        return self.weights_of(shard.index, shard.start, shard.stop)

    def rebuild_buckets(
        self,
        specs: Sequence[BucketSpec],
        collectives: Collectives,
        *,
        all_reduce: bool,
        buddy_links: SingleLevel | None = None,
    ) -> list[Bucket]:
        """Replace the buckets, with no collective in flight; return the old ones, without memory.

        `buddy_links` copy shards to buddies; None without buddies.

        Parameters move bucket by bucket, so that the model is never twice in memory.
        """
        old, self.buckets = self.buckets, []
        for bucket in old:
            bucket.release_gradients()
        bucket_of = {}
        for number, spec in enumerate(specs):
            bucket = Bucket(
                number,
                [(index, self._parameters[index]) for index in spec.indices],
                rank=collectives.rank,
                num_workers=collectives.num_workers,
                all_reduce=all_reduce,
                late=spec.is_late,
                buddy=buddy_links is not None,
            )
            self.buckets.append(bucket)
            for index in spec.indices:
                bucket_of[index] = bucket
                if index in self._bucket_of:
                    self._bucket_of[index].release_parameter()
                if index in self._unbucketed:
                    bucket.add_gradient(index, self._unbucketed.pop(index))
            bucket.copy_gradients()
        self.collectives, self.is_all_reduce, self._bucket_of = collectives, all_reduce, bucket_of
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        self._unsent = [bucket for bucket in self.buckets if not bucket.is_late]
        self._buddy_links = buddy_links
        self._incomplete.clear()  # their numbers are those of the old buckets
        return old

    def check_in_place(self) -> None:
        """Refuse weights that were moved out of the buffers: they would not be updated."""
        for parameter, address, name in zip(
            self._parameters, self._addresses, self._names, strict=True
        ):
            if parameter.data_ptr() != address:
                raise PolicyError(
                    f"{name} was moved to other memory",
                    expected="a model that keeps its device and dtype after this optimizer is "
                    "created",
                    fix="call to(), half() and similar methods before creating the optimizer",
                )

    @torch.no_grad()
    def recover_weights(self) -> None:
        """Copy weights that were moved, but have the same form, back into the buffers."""
        for index, bucket in self._bucket_of.items():
            parameter, view = self._parameters[index], bucket.view_of(bucket.weights, index)
            is_moved = parameter.data_ptr() != self._addresses[index]
            if is_moved and (parameter.dtype, parameter.device) == (view.dtype, view.device):
                view.copy_(parameter)
                parameter.data = view

    def check_has_gradients(self, call: str) -> None:
        if not self.has_gradients:
            raise PolicyError(
                f"{call} without a backward()",
                expected="loss.backward() before it, at least once outside no_sync()",
                fix="call it between backward() and zero_grad(); clip a norm before step()",
            )

    def hook_of(self, index: int) -> Callable[[Tensor], None]:
        """Return the function to call when backward has left a gradient in `.grad`.

        It runs for every parameter in every backward: it must take microseconds.
        """

        in_flight, used = self._in_flight[index], self._used

        # One function, without calls that a usual gradient does not need.
        def on_gradient(parameter: Tensor) -> None:
            if self._weight_gathers:
                self._check_received(index)
            if self.is_paused:
                return
            if not self._is_filling:
                self._begin_filling()
            gradient, bucket = parameter.grad, self._bucket_of.get(index)
            assert gradient is not None, "backward has just set it"
            if gradient.layout is not STRIDED:
                raise sparse_error(gradient)
            if bucket is None:
                self._add_unbucketed(index, gradient)
            else:
                if index in bucket.filled:
                    raise self._second_error(index)
                bucket.add_gradient(index, gradient)
            parameter.grad = in_flight
            used[index] = 1
            if bucket is not None and not bucket.expected:
                self._send_full_buckets()

        return on_gradient

    def _check_received(self, index: int) -> None:
        """Refuse the gradient of a parameter whose update had not arrived when it was used."""
        if self._bucket_of[index].number in self._weight_gathers:
            raise PolicyError(
                f"{self._names[index]} was used before its update had arrived",
                expected="parameters that are used by calling their module, as in the first step",
                fix="call optimizer.synchronize() before a forward that reads weights of modules "
                "it does not call",
            )

    def _add_unbucketed(self, index: int, gradient: Tensor) -> None:
        """Keep a gradient of the first backward, after which buckets are made."""
        if index in self._unbucketed:
            raise self._second_error(index)
        self._unbucketed[index] = gradient

    def _second_error(self, index: int) -> PolicyError:
        return PolicyError(
            f"a second gradient of {self._names[index]} since the last step",
            expected="a step() after each backward, or optimizer.zero_grad()",
            fix="call optimizer.zero_grad(), not the model's: the first gradient was sent",
        )

    def _begin_filling(self) -> None:
        self._check_error()
        if self._phase is GradientPhase.FINISHED:  # the averaged gradients were not used
            self.empty()
        for bucket in self.buckets:
            bucket.expect_gradients()
        if self.buckets:
            self._post_gradient_receives()
        self._set_phase(GradientPhase.FILLING)

    def finish(self) -> None:
        """Wait for the mean of all gradients; gradients that no worker has computed are None."""
        self._check_error()
        if self._phase is GradientPhase.FINISHED:
            return
        start = time.perf_counter()
        try:
            self._finish()
        except PeerError as error:
            self._error, self._is_filling = error, False
            raise
        self._waited += time.perf_counter() - start
        self._set_phase(GradientPhase.FINISHED)

    def post_weight_receives(self) -> None:
        """Post the receives of weights, as other workers may be ahead; not for late buckets."""
        self.wait_for_all()  # a bucket that no forward has used may not have taken its last ones
        self.copy_buddy_weights()
        for bucket in self.buckets:
            if not (bucket.is_all_reduce or bucket.is_late or bucket.number in self._incomplete):
                self._incomplete.add(bucket.number)
                self.collectives.post_receives(
                    bucket.weights, bucket.number, CollectivePhase.ALL_GATHER
                )

    def begin_update(self) -> None:
        """Post the receives that are not posted yet, after all gradients have arrived.

        From here on the next wait for parameters raises the error of a lost worker: the update must
        not fail.
        """
        self.trust_weights()
        try:
            self.post_weight_receives()
        except PeerError as error:
            self._weight_error = error

    def copy_buddy_weights(self) -> None:
        """Give copies the weights before the update, unless new ones may be arriving."""
        for bucket in self.buckets:
            if bucket.buddy_shards and self._is_complete(bucket):
                bucket.copy_buddy_weights()

    def _is_complete(self, bucket: Bucket) -> bool:
        return not self._is_unconfirmed and bucket.number not in self._incomplete

    def gather_weights(self) -> None:
        """Start to gather the updated weights; skip late buckets that no worker has used.

        The next wait for parameters raises the error of a lost worker.
        """
        self.mark_incomplete()
        self._is_unconfirmed = self._has_nccl
        if self._weight_error is not None:
            return
        try:
            for bucket in self.buckets:
                if bucket.number in self._incomplete:
                    pending = self.collectives.all_gather(bucket.weights, bucket.number)
                    if self.collectives.waits_on_host:
                        work = self._comm_thread.start(self._timed(pending))
                        pending = Pending(work.wait, pending.join)
                    self._weight_gathers[bucket.number] = pending
        except PeerError as error:
            self._weight_error = error

    def mark_incomplete(self) -> None:
        """After the update: weights that other workers own are to come."""
        self._incomplete = {
            bucket.number
            for bucket in self.buckets
            if not bucket.is_all_reduce and (self._is_used(bucket) or not bucket.is_late)
        }

    def wait_for_parameters(self, indices: Iterable[int]) -> None:
        """Wait for these parameters before they are used; may be called repeatedly."""
        if not self._weight_gathers and not self._weight_copies and self._weight_error is None:
            return
        for index in indices:
            if self._weight_error is not None:
                raise self._weight_error
            number = self._bucket_of[index].number
            if number in self._weight_gathers:
                start = time.perf_counter()
                self._weight_gathers[number].wait()  # raises at every call if a peer is lost
                self._waited += time.perf_counter() - start
                self._weight_copies[number] = self._weight_gathers.pop(number).join
                self._incomplete.discard(number)
                self._check_unchanged(self._bucket_of[index])
            if number in self._weight_copies and self._weight_copies[number]():
                del self._weight_copies[number]

    def wait_for_all(self) -> None:
        self.wait_for_parameters(range(len(self._parameters)))

    def confirm(self) -> None:
        """Return when all that was waited for is here, as far as this worker knows.

        Over NCCL a worker that is aborted first passes on what it has not received; `trust_weights`
        tells that all workers have confirmed. Raises PeerError.
        """
        if self._has_nccl and self.buckets:
            self.collectives.confirm()

    def trust_weights(self) -> None:
        """All workers have all weights of the last step: they have confirmed it."""
        self._is_unconfirmed = False

    def pop_timings(self) -> tuple[Seconds, Seconds]:
        """Return and reset the time that training waited and the longest exchange.

        In plain all-reduces the exchange is the last one that was not: they hide theirs.
        """
        if self._exchange or not self.is_all_reduce:
            self._last_exchange = self._exchange
        waited, self._waited, self._exchange = self._waited, 0.0, 0.0
        return waited, self._last_exchange

    def mark_changed(self) -> None:
        """Raise the version of the weights: autograd then refuses graphs from before the step."""
        torch.autograd.graph.increment_version(
            [p for p, used in zip(self._parameters, self._used, strict=False) if used]
        )
        self._versions = [parameter._version for parameter in self._parameters]

    def empty(self) -> None:
        """Forget all gradients, for the next backward."""
        for bucket in self.buckets:
            bucket.empty()
        self.is_prepared = False
        self._unbucketed.clear()
        self._used[:] = bytes(len(self._used))
        for shard in self.held_shards:
            shard.parameter.grad = None
        self._unsent = [bucket for bucket in self.buckets if not bucket.is_late]
        self.found_inf.grad = None
        self._set_phase(GradientPhase.EMPTY)

    def _check_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_unchanged(self, bucket: Bucket) -> None:
        for index, parameter in bucket.parameters.items():
            if parameter._version != self._versions[index]:
                raise PolicyError(
                    f"{self._names[index]} was changed while its update was in flight",
                    expected="weights left alone between step() and the next forward",
                    fix="call optimizer.synchronize() before changing weights by hand",
                )

    def _is_used(self, bucket: Bucket) -> bool:
        return any(self._used[index] for index in bucket.parameters)

    def _post_gradient_receives(self) -> None:
        for bucket in self._unsent[::-1]:
            self.collectives.post_receives(
                bucket.gradients, bucket.number, CollectivePhase.REDUCE_SCATTER
            )
        self._control.post_receives(self._flags, 0, CollectivePhase.FLAGS)

    def _send_full_buckets(self) -> None:
        while self._unsent and not self._unsent[-1].expected:
            self._send(self._unsent.pop())

    def _send(self, bucket: Bucket) -> None:
        bucket.fill_zeros()  # for frozen and unused parameters
        self._sums.append(_sum(bucket.gradients))
        self._start_reduce_scatter(bucket)

    def _finish(self) -> None:
        while self._unsent:
            bucket = self._unsent.pop()
            self._take_missing(bucket)
            self._send(bucket)
        late = [bucket for bucket in self.buckets if bucket.is_late]
        for bucket in late:
            self._take_missing(bucket)
            if self._is_used(bucket):
                bucket.fill_zeros()
                self._sums.append(_sum(bucket.gradients))
        sums = torch.stack([self.found_inf.new_zeros(()), *self._sums])
        bad, divisor = sums.isfinite().logical_not().any(), self._pop_divisor()
        own_divisor = 0.0 if divisor is None else divisor
        self._sums.clear()
        total: Count
        if isinstance(self.collectives, NcclCollectives):  # without blocking the host
            self.warn_of_non_finite()
            if not self._is_loss_scaled():
                self._read_later(bad)
            numbers = torch.stack([bad.double(), torch.ones_like(bad.double()) * own_divisor])
            self.collectives.all_reduce_sum(numbers)
            bad, total = numbers
            self._exchange_used()
        else:
            self._used[-1], self._divisor[0] = int(bad), own_divisor
            step, worker = self._name_step()
            is_fine = self._is_loss_scaled() or not self._used[-1]
            self._warnings.after(is_finite=is_fine, step=step, worker=worker)
            self._control.all_reduce_flags(self._flags, 0).wait()
            bad, total = torch.tensor(self._used[-1]), self._divisor.item()
        for bucket in late:
            if self._is_used(bucket):
                bucket.fill_zeros()
                self._start_reduce_scatter(bucket)
        for collectives in (self._reduce_scatters, self._all_gathers, self._buddy_copies):
            for pending in collectives:
                pending.wait()
                pending.join()
            collectives.clear()
        if divisor is not None:
            gradients = [shard.gradient for shard in self.held_shards]
            divide_by(total / self.collectives.num_workers, gradients)
        flag = bad.bool().to(self.found_inf.device)
        # What is not finite is never applied: without a gradient the optimizer skips the step.
        # With NCCL the host does not know of it: the gradients become 0, and optimizers that take
        # `found_inf` skip the step.
        is_skipped = False
        if isinstance(self.collectives, NcclCollectives):
            for bucket in self.buckets:
                for held in (bucket.owned_gradients, bucket.copied_gradients):
                    held.masked_fill_(flag, 0.0)
        else:
            is_skipped = bool(bad)
        for shard in self.held_shards:
            is_used = self._used[shard.index] and not is_skipped
            shard.parameter.grad = shard.gradient if is_used else None
        self.found_inf.grad = torch.zeros_like(self.found_inf).masked_fill_(flag, torch.nan)

    def _read_later(self, bad: Tensor) -> None:
        """Copy this worker's flag to the host without waiting for the GPU."""
        flag, copied = bad.to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record(torch.cuda.current_stream(bad.device))
        self._unread_flags.append((copied, flag, *self._name_step()))

    def warn_of_non_finite(self) -> None:
        """With NCCL, warn of steps whose flags have arrived; each comes a step late, or later."""
        while self._unread_flags and self._unread_flags[0][0].query():
            _, flag, step, worker = self._unread_flags.popleft()
            is_finite = not flag.item()
            if self._skips_on_device():
                self._warnings.after(is_finite=is_finite, step=step, worker=worker)
            elif self._was_finite and not is_finite:
                _logger.warning(
                    "step %d: the gradients of %s are not finite, and count as 0 on all replicas: "
                    "momentum and weight decay are applied; a fused optimizer skips such a step, "
                    "and so does a GradScaler",
                    *(step, worker),
                )
            self._was_finite = is_finite

    def _exchange_used(self) -> None:
        """With NCCL, find out which parameters any worker has used.

        If this worker has used all that are trained it knows that, and its host waits for no other:
        it only sends its flags, and receives those of the others in the next step.
        """
        self.finish_flags()
        self._trained[:-1] = self._now_trained()
        waits_for_none = self._used[:-1] == self._trained[:-1] == self._agreed
        self._trained[-1] = waits_for_none
        exchanged = self._flags.clone()
        self._sent_flags = self._control.all_reduce_flags(exchanged, 0)
        if not waits_for_none:
            self.finish_flags()
            self._flags.copy_(exchanged)
            self._agree_on_trained()

    def _now_trained(self) -> bytes:
        return bytes(parameter.requires_grad for parameter in self._parameters)

    def _agree_on_trained(self) -> None:
        """Count parameters as trained that any worker trains, if all workers wait for the flags.

        One that does not wait expects that exactly those are used which all have agreed on.
        """
        if not self._trained[-1]:
            self._agreed = bytes(self._trained[:-1])
            return
        for name, used, agreed in zip(self._names, self._used, self._agreed, strict=False):
            if used and not agreed:
                raise PolicyError(
                    f"{name} has a gradient, but is frozen on another worker",
                    expected="parameters that all workers train, or freeze, from the same step on",
                    fix="call requires_grad_() on all workers before the same backward",
                )

    def finish_flags(self) -> None:
        """Wait until other workers have received the flags of the last step."""
        if self._sent_flags is not None:
            self._sent_flags.wait()
            self._sent_flags = None

    def _take_missing(self, bucket: Bucket) -> None:
        """Take gradients that were left in `.grad`: of an earlier backward, or of tied weights."""
        for index in bucket.missing:
            parameter = self._parameters[index]
            if parameter.grad is not None and has_gradient(parameter):
                if parameter.grad.layout is not STRIDED:
                    raise sparse_error(parameter.grad)
                bucket.add_gradient(index, parameter.grad)
                parameter.grad = self._in_flight[index]
                self._used[index] = 1

    def _timed(self, pending: Pending) -> Callable[[], None]:
        """Time an all-gather, which all workers start at about the same time; count it twice.

        The reduce-scatter takes as long.
        """
        start = time.perf_counter()

        def wait() -> None:
            pending.wait()
            self._exchange = max(self._exchange, 2 * (time.perf_counter() - start))

        return wait

    def _start_reduce_scatter(self, bucket: Bucket) -> None:
        pending = self.collectives.reduce_scatter(bucket.gradients, bucket.number)

        def gather() -> None:
            gathered = self.collectives.all_gather(bucket.gradients, bucket.number)
            self._all_gathers.append(gathered)

        def reduce() -> None:
            pending.wait()
            if bucket.is_all_reduce:
                pending.join()
                gather()
                if len(self._all_gathers) > 1:  # copied to the GPU while this one travels
                    previous = self._all_gathers[-2]
                    previous.wait()
                    self._all_gathers[-2] = Pending(lambda: None, previous.join)
            elif self._buddy_links is not None:
                # The sends of this worker's own addends have ended: their memory is free.
                pending.join()
                copied = self._buddy_links.copy_to_buddy(bucket.gradients, bucket.number)
                self._buddy_copies.append(copied)

        if self.collectives.waits_on_host:
            work = self._comm_thread.start(reduce)
            self._reduce_scatters.append(Pending(work.wait, pending.join))
        else:
            self._reduce_scatters.append(pending)
            if bucket.is_all_reduce:
                gather()
            elif self._buddy_links is not None:
                copied = self._buddy_links.copy_to_buddy(bucket.gradients, bucket.number)
                self._buddy_copies.append(copied)


def _sum(flat: Tensor) -> Tensor:
    """Sum in single precision: not finite if any number is not finite."""
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return real.sum(dtype=torch.float32)


class NcclReach(Enum):
    """Between which replicas NCCL averages in `decoupled`."""

    NONE = auto()
    INSIDE_SITES = auto()  # gloo between them
    ALL = auto()


def nccl_reach(sites: Sequence[str | None]) -> NcclReach:
    """Return what the sites of all replicas of a stage allow."""
    if None in sites:
        return NcclReach.NONE
    if len(set(sites)) == 1:  # NCCL builds its own hierarchy
        return NcclReach.ALL
    nodes = [site for site in sites if site is not None]
    return NcclReach.NONE if ranks_by_node(nodes) is None else NcclReach.INSIDE_SITES


def ranks_by_node(nodes: Sequence[str]) -> list[list[int]] | None:
    """Group ranks by node; `nodes[rank]` names the node. None if a hierarchy gains nothing."""
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    sizes = {len(ranks) for ranks in members.values()}
    if len(members) < 2 or len(sizes) > 1 or sizes == {1}:
        return None
    return list(members.values())


@cache
def _name_of_this_node() -> str:
    """Return torchrun's node rank, or else the host name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()

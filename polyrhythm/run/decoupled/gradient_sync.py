"""Average gradients and gather updated weights, bucket by bucket.

The reduce-scatter of a bucket starts when backward has filled it and all buckets before it, which
have the same order on all workers: from the last in forward order to the first. Late buckets follow
after backward, if any worker has a gradient for them. After the optimizer step the weights are
gathered in forward order. With all-reduce buckets, the averaged gradients are gathered instead,
still during backward: a plain all-reduce.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.run.comm.comm_thread import CommThread, Work
from polyrhythm.run.comm.process_groups import Replicas, new_gloo_group
from polyrhythm.run.comm.reduce_scatter import (
    CollectivePhase,
    Collectives,
    GlooCollectives,
    HierarchicalCollectives,
    NcclCollectives,
    Pending,
    select_backend,
    uses_nccl,
)
from polyrhythm.run.decoupled.buckets import Bucket, BucketSpec, ParameterShard, has_gradient
from polyrhythm.run.pipeline.loss import Count, NonFiniteWarnings, divide_by
from polyrhythm.types import Seconds, Worker


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
        node: str | None,
        call: str,
        timeout: Seconds,
    ) -> None:
        """`process_group` is torch's group of the replicas, if there is one."""
        self._process_group, self._device = process_group, device
        self.control = GlooCollectives(replicas.group, timeout=timeout)
        nodes = ranks_by_node(replicas.all_gather_object(node or _name_of_this_node(), call))
        has_nccl = process_group is not None and uses_nccl(device, process_group)
        groups, self._hierarchical = [replicas.group], None
        self._nodes = nodes  # members by node, if there is a hierarchy
        if nodes is not None and not has_nccl:  # NCCL builds its own hierarchy
            own_node = next(members for members in nodes if replicas.rank in members)
            local_index = own_node.index(replicas.rank)
            across_nodes = [members[local_index] for members in nodes]
            for where, members in (("inside", own_node), ("across", across_nodes)):
                what = f"averaging gradients {where} nodes"
                ranks = [replicas.ranks[member] for member in members]
                groups.append(new_gloo_group(ranks, what, timeout=timeout))
            inside, across = (GlooCollectives(group, timeout=timeout) for group in groups[1:])
            self._hierarchical = HierarchicalCollectives(inside, across)
        self.comm_thread = CommThread(groups, timeout=timeout)
        self._by_hierarchy: dict[bool, Collectives] = {}

    @property
    def has_hierarchy(self) -> bool:
        return self._hierarchical is not None

    def shard_owners(self, *, hierarchical: bool) -> list[int] | None:
        """Return the replica that owns each shard; None if they own them in order."""
        if not hierarchical or self._nodes is None:
            return None
        by_local_index = zip(*self._nodes, strict=True)
        return [member for members in by_local_index for member in members]

    def get(self, *, hierarchical: bool) -> Collectives:
        """Return the collectives for the device of the parameters."""
        if hierarchical not in self._by_hierarchy:
            host = self._hierarchical if hierarchical else self.control
            assert host is not None, "hierarchical modes are candidates only with a hierarchy"
            self._by_hierarchy[hierarchical] = select_backend(
                self._device, self._process_group, host, start=self.comm_thread.start
            )
        return self._by_hierarchy[hierarchical]


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
    ) -> None:
        """`pop_divisor`: divides this worker's gradients; None if labels are not counted.

        `name_step`: the current step and this worker, for a warning.
        """
        self._parameters, self._names, self._pop_divisor = parameters, names, pop_divisor
        self._name_step, self._warnings = name_step, NonFiniteWarnings()
        self._tied = [parameters[index] for index in tied]
        self._control, self._comm_thread = replicas.control, replicas.comm_thread
        self.buckets: list[Bucket] = []
        # A parameter in the optimizer's groups whose gradient is 0, or nan if any worker has a
        # non-finite gradient: a GradScaler then skips the step on all workers, or on none.
        self.found_inf = nn.Parameter(torch.zeros(1, device=parameters[0].device))
        self._phase = GradientPhase.EMPTY
        self.is_paused = False  # gradients accumulate, and are not averaged
        # The divisor; for each parameter, whether it has a gradient; whether any is not finite.
        self._flags = torch.zeros(8 * (2 + len(parameters) // 8), dtype=torch.uint8)
        self._divisor = self._flags[:8].view(torch.float64)
        self._used = self._flags[8 : 9 + len(parameters)]
        self._weight_gathers: dict[int, Pending | Work] = {}  # by number of bucket
        self._unsent: list[Bucket] = []  # buckets still to reduce; the next one is the last
        self._reduce_scatters: list[Pending | Work] = []
        self._all_gathers: list[Pending] = []
        self._sums: list[Tensor] = []  # of the gradients of each bucket that was sent
        self._versions: list[int] = []  # of the parameters when their gather started
        self._waited: Seconds = 0.0  # time for which training waited for other workers
        self._exchange: Seconds = 0.0  # of both collectives, if all workers start at once
        self._error: PeerError | None = None  # the gradients are unusable after it

    @property
    def has_gradients(self) -> bool:
        return self._phase is not GradientPhase.EMPTY or any(map(has_gradient, self._tied))

    @property
    def shards(self) -> Iterator[ParameterShard]:
        return (shard for bucket in self.buckets for shard in bucket.shards)

    def rebuild_buckets(
        self, specs: Sequence[BucketSpec], collectives: Collectives, *, all_reduce: bool
    ) -> None:
        """Replace the buckets; no collective may be in flight."""
        self.collectives, self.is_all_reduce = collectives, all_reduce
        self.buckets = [
            Bucket(
                number,
                [(index, self._parameters[index]) for index in spec.indices],
                rank=collectives.rank,
                num_workers=collectives.num_workers,
                all_reduce=all_reduce,
                late=spec.is_late,
            )
            for number, spec in enumerate(specs)
        ]
        self._bucket_of = {i: bucket for bucket in self.buckets for i in bucket.parameters}
        self.empty()

    def check_has_gradients(self, call: str) -> None:
        if not self.has_gradients:
            raise PolicyError(
                f"{call} without a backward()",
                expected="loss.backward() before it, at least once outside no_sync()",
                fix="call it between backward() and zero_grad(); clip a norm before step()",
            )

    def check_received(self, index: int) -> None:
        """Refuse the gradient of a parameter whose update had not arrived when it was used."""
        if self._bucket_of[index].number in self._weight_gathers:
            raise PolicyError(
                f"{self._names[index]} was used before its update had arrived",
                expected="parameters that are used by calling their module, as in the first step",
                fix="call optimizer.synchronize() before a forward that reads weights of modules "
                "it does not call",
            )

    def add_gradient(self, index: int) -> None:
        """Take the gradient that backward has just left in `.grad` of a parameter."""
        self._check_error()
        if self._phase is GradientPhase.FINISHED:  # the averaged gradients were not used
            self.empty()
        bucket = self._bucket_of[index]
        if bucket.is_filled(index):
            raise PolicyError(
                f"a second gradient of {self._names[index]} since the last step",
                expected="a step() after each backward, or optimizer.zero_grad()",
                fix="call optimizer.zero_grad(), not the model's: the first gradient was sent",
            )
        bucket.fill(index)
        if self._phase is GradientPhase.EMPTY:
            self._post_gradient_receives()
        self._phase = GradientPhase.FILLING
        self._used[index] = 1
        self._send_full_buckets()

    def finish(self) -> None:
        """Wait for the mean of all gradients; gradients that no worker has computed are None."""
        self._check_error()
        if self._phase is GradientPhase.FINISHED:
            return
        start = time.perf_counter()
        try:
            self._finish()
        except PeerError as error:
            self._error = error
            raise
        self._waited += time.perf_counter() - start
        self._phase = GradientPhase.FINISHED

    def post_weight_receives(self) -> None:
        """Post the receives of weights, as other workers may be ahead; not for late buckets."""
        for bucket in self.buckets:
            if not bucket.is_all_reduce and not bucket.is_late:
                self.collectives.post_receives(
                    bucket.weights, bucket.number, CollectivePhase.ALL_GATHER
                )

    def gather_weights(self) -> None:
        """Start to gather the updated weights; skip late buckets that no worker has used."""
        for bucket in self.buckets:
            if not bucket.is_all_reduce and (self._is_used(bucket) or not bucket.is_late):
                pending: Pending | Work
                pending = started = self.collectives.all_gather(bucket.weights, bucket.number)
                if self.collectives.waits_on_host:
                    pending = self._comm_thread.start(self._timed(started))
                self._weight_gathers[bucket.number] = pending

    def wait_for_parameters(self, indices: Iterable[int]) -> None:
        """Wait for these parameters before they are used; may be called repeatedly."""
        for index in indices:
            number = self._bucket_of[index].number
            if number in self._weight_gathers:
                start = time.perf_counter()
                self._weight_gathers[number].wait()  # raises at every call if a peer is lost
                self._waited += time.perf_counter() - start
                del self._weight_gathers[number]
                self._check_unchanged(self._bucket_of[index])

    def wait_for_all(self) -> None:
        self.wait_for_parameters(range(len(self._parameters)))

    def pop_timings(self) -> tuple[Seconds, Seconds]:
        """Return and reset the time that training waited and the longest exchange."""
        times = self._waited, self._exchange
        self._waited = self._exchange = 0.0
        return times

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
        self._used.zero_()
        for shard in self.shards:
            shard.parameter.grad = None
        self._unsent = [bucket for bucket in self.buckets if not bucket.is_late]
        self._phase, self.found_inf.grad = GradientPhase.EMPTY, None

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
        while self._unsent and self._unsent[-1].is_full:
            bucket = self._unsent.pop()
            self._fill_missing(bucket)  # frozen parameters
            self._sums.append(_sum(bucket.gradients))
            self._start_reduce_scatter(bucket)

    def _finish(self) -> None:
        for bucket in self._unsent:
            self._fill_missing(bucket)
        self._send_full_buckets()
        late = [bucket for bucket in self.buckets if bucket.is_late]
        for bucket in late:
            if any(has_gradient(p) or self._used[i] for i, p in bucket.parameters.items()):
                self._fill_missing(bucket)
                self._sums.append(_sum(bucket.gradients))
        sums = torch.stack([self.found_inf.new_zeros(()), *self._sums])
        bad, divisor = sums.isfinite().logical_not().any(), self._pop_divisor()
        own_divisor = 0.0 if divisor is None else divisor
        self._sums.clear()
        total: Count
        if isinstance(self.collectives, NcclCollectives):  # without blocking the host
            numbers = torch.stack([bad.double(), torch.ones_like(bad.double()) * own_divisor])
            self.collectives.all_reduce_sum(numbers)
            bad, total = numbers
            self._control.all_reduce_flags(self._flags, 0).wait()
        else:
            self._used[-1], self._divisor[0] = bad, own_divisor
            step, worker = self._name_step()  # with NCCL the host does not know of them
            self._warnings.after(is_finite=not self._used[-1], step=step, worker=worker)
            self._control.all_reduce_flags(self._flags, 0).wait()
            bad, total = self._used[-1], self._divisor.item()
        for bucket in late:
            if self._is_used(bucket):
                self._fill_missing(bucket)
                self._start_reduce_scatter(bucket)
        for pending in self._reduce_scatters:
            pending.wait()
        for pending in self._all_gathers:
            pending.wait()
        self._reduce_scatters.clear()
        self._all_gathers.clear()
        if divisor is not None:
            divide_by(total / self.collectives.num_workers, [s.gradient for s in self.shards])
        flag = bad.bool().to(self.found_inf.device)
        # What is not finite is never applied: without a gradient the optimizer skips the step.
        # With NCCL the host does not know of it, and the gradients become 0.
        is_skipped = not isinstance(self.collectives, NcclCollectives) and bool(bad)
        for shard in self.shards:
            is_used = self._used[shard.index] and not is_skipped
            shard.parameter.grad = shard.gradient if is_used else None
            if is_used and isinstance(self.collectives, NcclCollectives):
                shard.gradient.masked_fill_(flag, 0.0)
        self.found_inf.grad = torch.zeros_like(self.found_inf).masked_fill_(flag, torch.nan)

    def _fill_missing(self, bucket: Bucket) -> None:
        """Fill the gradients that the bucket still lacks, once."""
        for index in bucket.missing:
            if has_gradient(self._parameters[index]):
                self._used[index] = 1
            bucket.fill(index)

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
            if bucket.is_all_reduce:
                gathered = self.collectives.all_gather(bucket.gradients, bucket.number)
                self._all_gathers.append(gathered)

        def reduce() -> None:
            pending.wait()
            gather()

        if self.collectives.waits_on_host:
            self._reduce_scatters.append(self._comm_thread.start(reduce))
        else:
            self._reduce_scatters.append(pending)
            gather()


def _sum(flat: Tensor) -> Tensor:
    """Sum in single precision: not finite if any number is not finite."""
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return real.sum(dtype=torch.float32)


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

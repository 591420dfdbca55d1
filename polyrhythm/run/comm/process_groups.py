"""Gloo process groups that only their members create, agreements among them, and the job's mesh.

torch.distributed.new_group needs every process of the job or, with local synchronisation, the same
number of groups made before on all members: a stage with one more (as for tensor parallelism)
would wait under a name that no other member uses. Here the name depends on the members, the purpose
and a count of their arrivals, which the store of the default group keeps: no process counts by
itself, so that one that is started later takes part as well as the others.
"""

import contextlib
import ctypes
import hashlib
import itertools
import os
import struct
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from polyrhythm.errors import LaunchError, PeerError, PolicyError, peer_errors
from polyrhythm.run.comm.epoch import current_epoch, start_thread
from polyrhythm.run.comm.store import JobStore, Members, job_store_backend, prefixed
from polyrhythm.types import Bytes, Seconds

# For every wait for another process, in the whole API: longer than usual pauses, such as an
# evaluation on one rank or compiling a stage.
DEFAULT_TIMEOUT: Seconds = 600.0
# In its first steps a worker compiles, tunes kernels or captures CUDA graphs, which may take longer
# than a timeout. One that dies then is noticed at once all the same: its connections close.
FIRST_STEP_TIMEOUT: Seconds = 1800.0
NUM_FIRST_STEPS = 2  # others notice in the second one that the first update has taken long
# Per peer, for gradients of GPUs over gloo: see `gloo_device`. A message has as many tags.
NUM_SOCKETS = 2
_MIN_SPLIT: Bytes = 4 * 2**20  # of a message that travels in several sockets
_UNUSED_TAG, INTERFACES = 2**30, "GLOO_SOCKET_IFNAME"  # of the environment, as torch reads it
_EVENT_POLL: Seconds = 2e-4
_MAX_CLOSES = 1000  # of one connection, each after `_CLOSE_TIMEOUT`
_CLOSE_TIMEOUT, _IN_TRANSFER = timedelta(milliseconds=1), timedelta(milliseconds=50)
_CALL = struct.Struct("32sd")  # the name of a call, padded with zeros, and a number


_aborted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # groups of NCCL


class GlooGroup(dist.ProcessGroupGloo):
    """A group whose wait for its ranks to connect ends with the epoch.

    Gloo waits for a connection five times as long as its timeout, even from a rank that has failed
    to connect with another one and is gone.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        current_epoch().wait(partial(super().__init__, *args, **kwargs))


@contextlib.contextmanager
def connecting_in_epoch() -> Iterator[None]:
    """Let functions of torch make groups whose wait for their ranks ends with the epoch."""
    original = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = GlooGroup  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = original  # type: ignore[misc]


class Replicas:
    """A gloo group of the workers that hold one model, and what they agree on; for one thread.

    All workers make it together, and then the same calls in the same order: each agreement names
    its call. A worker that is lost before it, or in another call, is noticed at once: names and
    numbers go over gloo. Objects follow through the job's store, under this group's unique name.
    """

    def __init__(self, ranks: Sequence[int], purpose: str, *, timeout: Seconds) -> None:
        self.ranks = list(ranks)
        name = unique_name(ranks, purpose)
        self.group = _connect(ranks, purpose, name, timeout)
        self.rank, self.num_workers = self.group.rank(), len(self.ranks)
        backend = job_store_backend(f"{name}/agreements", timeout)
        self._store = JobStore(backend, dist.get_rank(), timeout=timeout)
        self._members, self._last_agreement = Members(tuple(ranks)), ""
        self._num_agreements = 0  # with the call, the name of an agreement

    def all_gather_number(self, number: float, call: str) -> list[float]:
        """Return the numbers of all workers by rank; raises PolicyError if one is in another call.

        For one number per step: it needs a single exchange.
        """
        assert len(call) <= 32, "it would be cut off, and differ from itself"
        own = torch.frombuffer(bytearray(_CALL.pack(call.encode(), number)), dtype=torch.uint8)
        with peer_errors("another worker", f"{call}, which all workers call"):
            gathered = all_gather(self.group, own)
        numbers = []
        for rank, message in enumerate(gathered):
            padded, received = _CALL.unpack(message.numpy().tobytes())
            other = padded.rstrip(b"\0").decode()
            if other != call:
                raise PolicyError(
                    f"rank {self.ranks[self.rank]} is in {call}, and rank {self.ranks[rank]} in "
                    f"{other}",
                    expected="all workers in the same call",
                    fix="call it on all workers, even if only one needs the result",
                )
            numbers.append(received)
        return numbers

    def all_gather_object(self, value: Any, call: str) -> list[Any]:
        """Return the values of all workers by rank: plain data, see JobStore."""
        name = self._begin_agreement(call)
        return self._store.all_gather_object(name, value, self._members)

    def broadcast_object(self, value: Any, call: str) -> Any:
        """Return the first worker's value on all workers."""
        return self._store.broadcast_object(self._begin_agreement(call), value, self._members)

    def run_on_first(self, function: Callable[[], Any], call: str, *, as_type: Any) -> Any:
        """Call `function` on the first worker, which may take long; return its result on all."""
        name = self._begin_agreement(call)
        return self._store.run_on_leader(name, function, self._members, as_type=as_type)

    def _begin_agreement(self, call: str) -> str:
        """Return the name of the next agreement, when all workers are in it."""
        self.all_gather_number(0.0, call)
        if self._last_agreement:  # all workers have read it
            self._store.delete(self._last_agreement, self._members)
        self._num_agreements += 1
        self._last_agreement = f"{call} {self._num_agreements}"
        return self._last_agreement

    def broadcast_initial_state(self, call: str, *parts: Sequence[Tensor]) -> None:
        """Broadcast the first worker's tensors; skip each part that is already equal everywhere."""
        if self.num_workers == 1:
            return
        digests = self.all_gather_object([fingerprint(part) for part in parts], call)
        for part, part_digests in zip(parts, zip(*digests, strict=True), strict=True):
            if len(set(part_digests)) > 1:
                self._broadcast(part)

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        with peer_errors("another worker", "broadcasting the initial weights"):
            for tensor in tensors:
                if tensor.numel():
                    first = tensor.detach().cpu().contiguous()
                    raw = first.view(-1).view(torch.uint8)  # gloo does not support every dtype
                    current_epoch().wait(self.group.broadcast(raw, 0).wait)
                    tensor.copy_(first)


def new_gloo_group(
    ranks: Sequence[int], purpose: str, *, timeout: Seconds, num_sockets: int = 1
) -> dist.ProcessGroup:
    """Create a gloo group of these ranks, called by all of them; ranks inside it are indices.

    The functions of torch.distributed do not know this group: use its methods or those below.
    It has `num_sockets` per peer: see `gloo_device`.
    """
    return _connect(ranks, purpose, unique_name(ranks, purpose), timeout, num_sockets)


def new_nccl_group(
    ranks: Sequence[int], purpose: str, *, timeout: Seconds, is_used: bool = True
) -> dist.ProcessGroup | None:
    """Create an NCCL group of these ranks, called by all of them; None where it is not used.

    It connects two ranks, or all of them, at their first message or collective. If NCCL finds that
    a peer is lost, or a message takes longer than the timeout, torch ends the kernels that wait and
    would end the process, too; here only the group is unusable then.
    """
    name = unique_name(ranks, purpose)
    if not is_used:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    making = peer_errors("another process", f"making the group for {purpose}")
    # Read by the constructor. 2: abort the group after an error, and leave the process alone.
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    with making, default_environment(defaults):
        made: dist.ProcessGroup = dist.ProcessGroupNCCL(  # type: ignore[assignment]  # same methods
            PrefixStore(name, _get_default_store()),
            list(ranks).index(dist.get_rank()),
            len(ranks),
            options,
        )
        current_epoch().add(made)
        return made


@contextlib.contextmanager
def default_environment(defaults: dict[str, str]) -> Iterator[None]:
    """Set variables that are not set, for the block alone: the user's own groups read them, too."""
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(unset)
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]


def step_timeout(timeout: Seconds, num_done: int) -> Seconds:
    """Return the longest wait for another worker in a step, after `num_done` like it."""
    return max(timeout, FIRST_STEP_TIMEOUT) if num_done < NUM_FIRST_STEPS else timeout


def set_timeout(group: dist.ProcessGroup, timeout: Seconds) -> None:
    """Bound all later waits in a group, of gloo or NCCL, except those with their own timeout."""
    group._set_default_timeout(timedelta(seconds=timeout))  # type: ignore[attr-defined]  # no stub


def connect_pairs(
    group: dist.ProcessGroup,
    others: Collection[int],
    device: torch.device,
    *,
    timeout: Seconds,
) -> None:
    """Connect this rank of an NCCL group with `others`, which call it, too; raises PeerError.

    The first message of a pair would wait for the other rank, in each direction. All ranks go
    through pairs in one order.
    """
    rank = group.rank()
    pairs = sorted((min(rank, other), max(rank, other)) for other in others)

    def connect() -> None:
        torch.cuda.set_device(device)  # of this thread
        message = torch.zeros(1, dtype=torch.uint8, device=device)
        for low, high in pairs:
            for sender, receiver in ((low, high), (high, low)):
                if rank == sender:
                    group.send([message], receiver, 0).wait()
                else:
                    group.recv([message], sender, 0).wait()
        torch.cuda.current_stream(device).synchronize()

    run_bounded(connect, timeout=timeout, action="connecting over NCCL")


def connect_all(group: dist.ProcessGroup, device: torch.device, *, timeout: Seconds) -> None:
    """Connect all ranks of an NCCL group, which call it; raises PeerError.

    The first collective would wait for ever for a rank that is lost before it: no abort ends that.
    """

    def connect() -> None:
        torch.cuda.set_device(device)  # of this thread
        group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.current_stream(device).synchronize()

    run_bounded(connect, timeout=timeout, action="connecting over NCCL")


def run_bounded(function: Callable[[], None], *, timeout: Seconds, action: str) -> None:
    """Call a function of NCCL, which may wait for ever; raises PeerError after the timeout.

    Also if the epoch ends before.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            function()
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)

    # Not a thread of an executor, for which the interpreter would wait when it ends.
    start_thread(run, name=action)
    with peer_errors("another worker", action):
        try:
            current_epoch().wait(partial(done.result, timeout))
        except TimeoutError:
            raise PeerError(
                "another worker", action=action, waited=timeout, cause="it does not answer"
            ) from None


def wait_for_event(event: torch.cuda.Event, timeout: Seconds | None) -> None:
    """Wait until the GPU has run an event; with a timeout poll, for NCCL's kernels may never end.

    They wait for other workers, which may be lost: raises PeerError, also if the epoch ends.
    """
    if timeout is None:
        event.synchronize()
        return
    start, epoch = time.monotonic(), current_epoch()
    while not event.query():
        epoch.check()
        if (waited := time.monotonic() - start) > timeout:
            cause = "kernels of NCCL still wait for it"
            raise PeerError("another worker", action="a step", waited=waited, cause=cause)
        time.sleep(_EVENT_POLL)


def confirm_nccl(
    groups: Sequence[dist.ProcessGroup], device: torch.device, timeout: Seconds
) -> None:
    """Return when the GPU has run all kernels that the current stream waits for.

    Raises PeerError if kernels of these groups of NCCL have not received all that they were to:
    after an error they end as if they had.
    """
    if groups:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        wait_for_event(event, timeout)
        check_nccl(groups)


def check_nccl(groups: Iterable[dist.ProcessGroup]) -> None:
    """Raise PeerError if kernels of these groups have ended without what they were to receive."""
    current_epoch().check()
    for group in groups:
        error = group.get_error()  # type: ignore[attr-defined]  # in the stub of a backend
        if group in _aborted or error != ErrorType.SUCCESS:
            cause = "its connection was lost"
            raise PeerError("another worker", action="receiving over NCCL", waited=0.0, cause=cause)


def unique_name(ranks: Sequence[int], purpose: str) -> str:
    """Return a new name for something that these ranks make together, for this purpose."""
    with peer_errors("the process that serves the job's store", f"naming the group for {purpose}"):
        name = f"polyrhythm/{','.join(map(str, ranks))}/{purpose}"
        return f"{name}/{count_rounds(_get_default_store(), name, len(ranks))}"


def count_rounds(store: Store, name: str, num_processes: int) -> int:
    """Return how many times all processes have called this under the name, before this time."""
    return (int(store.add(f"{name}/arrivals", 1)) - 1) // num_processes


def _connect(
    ranks: Sequence[int], purpose: str, name: str, timeout: Seconds, num_sockets: int = 1
) -> dist.ProcessGroup:
    options = gloo_options(num_sockets)
    options._timeout = timedelta(seconds=_connect_timeout(ranks, name, timeout))
    with peer_errors("another process", f"making the group for {purpose}"):
        made: dist.ProcessGroup = GlooGroup(  # type: ignore[assignment]  # same methods
            PrefixStore(name, _get_default_store()),
            list(ranks).index(dist.get_rank()),
            len(ranks),
            options,
        )
    current_epoch().add(made)
    set_timeout(made, timeout)
    return made


def gloo_options(num_sockets: int = 1) -> Any:
    """Return the options of a gloo group with at least `num_sockets` per peer."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    interfaces = os.environ.get(INTERFACES, "")
    num_devices = max(num_sockets, interfaces.count(",") + 1)  # each interface has one, as in torch
    options._devices = [gloo_device(interfaces, number) for number in range(num_devices)]
    options._threads = 2 * num_devices  # as torch has
    return options


def _connect_timeout(ranks: Sequence[int], name: str, timeout: Seconds) -> Seconds:
    """Return how long these ranks may take to connect; in an epoch wait until all are here.

    Gloo waits for their addresses in the store, which no abort can end: for a rank that is lost
    before, a thread would wait until the timeout.
    """
    epoch = current_epoch()
    if epoch.connects_at_once:
        backend = prefixed(name, _get_default_store())
        store = JobStore(backend, dist.get_rank(), timeout=timeout)
        store.barrier("to connect", Members(tuple(ranks)))
    return epoch.connect_timeout(timeout)


def gloo_device(interfaces: str, number: int) -> dist.ProcessGroupGloo.Device:
    """Return a device for gloo groups: in each of them a socket per peer, and one thread for all.

    `number` chooses one of the `interfaces`, names with commas between them. Over loopback or a
    fast network the thread bounds the bandwidth: a group with two devices has twice as much. Of
    these a point-to-point message takes the one of its tag, modulo their number.
    """
    names = [name for name in interfaces.split(",") if name]
    if not names:
        return dist.ProcessGroupGloo.create_default_device()
    return dist.ProcessGroupGloo.create_device(interface=names[number % len(names)])


def split_message(flat: Tensor, tag: int, num_sockets: int) -> list[tuple[Tensor, int]]:
    """Return the parts in which a message travels, with their tags; `tag` is the first of its own.

    Only large messages use several sockets: small ones keep their order, in the first.
    """
    if num_sockets == 1 or flat.nbytes < _MIN_SPLIT:
        return [(flat, tag)]
    return [(part, tag + number) for number, part in enumerate(flat.chunk(num_sockets))]


def job_mesh(
    num_pipelines: int,
    num_stages: int,
    *,
    device_type: str = "cpu",
    timeout: Seconds = DEFAULT_TIMEOUT,
) -> DeviceMesh:
    """Return the job's mesh: pipelines along "dp", the stages of each along "pp".

    Every `num_stages` consecutive ranks make one pipeline, as plans number them. All processes call
    this together, and torch connects each row and each column.
    """
    if not dist.is_initialized():
        raise LaunchError(
            "a mesh without a process group",
            expected="an initialised torch.distributed",
            fix="start several processes, with torchrun or polyrhythm train",
        )
    if (world := dist.get_world_size()) != num_pipelines * num_stages:
        raise LaunchError(
            f"{world} processes for a mesh of {num_pipelines} pipelines x {num_stages} stages",
            expected=f"{num_pipelines * num_stages} processes",
            fix="use the numbers of the job's plan: all its pipelines have all stages",
        )
    layout = torch.arange(world).view(num_pipelines, num_stages)
    pipeline, stage = divmod(dist.get_rank(), num_stages)
    with peer_errors("another process", "making the groups of the job's mesh"):
        groups = [
            _new_mesh_group(members.tolist(), f"the mesh along {along}", timeout)
            for along, members in (("dp", layout[:, stage]), ("pp", layout[pipeline]))
        ]
    return DeviceMesh.from_group(groups, device_type, layout, mesh_dim_names=("dp", "pp"))


def _new_mesh_group(ranks: list[int], purpose: str, timeout: Seconds) -> dist.ProcessGroup:
    limit, epoch = timeout, current_epoch()
    if epoch.connects_at_once:
        limit = _connect_timeout(ranks, unique_name(ranks, purpose), timeout)
    with connecting_in_epoch():
        made: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timedelta(seconds=limit), use_local_synchronization=True
        )
    if epoch.connects_at_once:
        backend = gloo_of(made)
        set_timeout(backend, timeout)
        epoch.add(backend, keeps=True)
    return made


def gloo_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the gloo group in a group of torch.distributed."""
    made: Any = group._get_backend(torch.device("cpu"))
    return cast(dist.ProcessGroup, made)  # it has the same methods


def replica_ranks(
    group: dist.ProcessGroup | None, num_stages: int
) -> tuple[list[int], dist.ProcessGroup | None]:
    """Return the ranks of the replicas of this stage, and torch's group of them, if there is one.

    By default every `num_stages` consecutive ranks make one pipeline, as in `job_mesh`.
    """
    if group is None and num_stages == 1:
        group = dist.group.WORLD
    if group is not None:
        check_member(group)
        return dist.get_process_group_ranks(group), group
    return list(range(dist.get_rank() % num_stages, dist.get_world_size(), num_stages)), None


def check_member(group: dist.ProcessGroup | None) -> None:
    """Refuse a `process_group=` that this process is not in."""
    if dist.is_initialized() and dist.get_rank(group) < 0:
        raise PolicyError(
            f"process_group= without rank {dist.get_rank()}, which passes it",
            expected="a process group that contains this process",
            fix="pass the group that new_group() or DeviceMesh.get_group() returns in its members",
        )


def send(group: dist.ProcessGroup, tensor: Tensor, to: int, *, tag: int) -> None:
    current_epoch().wait(group.send([tensor], to, tag).wait)


def receive(group: dist.ProcessGroup, tensor: Tensor, sender: int, *, tag: int) -> None:
    current_epoch().wait(group.recv([tensor], sender, tag).wait)


def all_reduce(
    group: dist.ProcessGroup, tensor: Tensor, operation: dist.ReduceOp.RedOpType
) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(operation)
    current_epoch().wait(group.allreduce([tensor], options).wait)


def all_gather(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    outputs = [torch.empty_like(tensor) for _ in range(group.size())]
    current_epoch().wait(group.allgather([outputs], [tensor]).wait)
    return outputs


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Hash the bytes and the boundaries of `tensors`; equal exactly for equal contents.

    Most replicas start from the same seed or checkpoint; comparing hashes avoids a broadcast.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(raw.numel().to_bytes(8, "big"))
        digest.update(raw.numpy().data)
    return digest.hexdigest()


def abort(group: dist.ProcessGroup) -> None:
    """Wake all threads that wait in the group, here and on peers; the group is unusable afterwards.

    Of NCCL another thread ends the kernels that wait for a peer: it frees memory, for which it
    waits for all kernels, also those of groups that are aborted next. Gloo's abort does nothing,
    but a receive that times out closes all connections of its group. A receive from a lost peer
    fails at once and closes nothing: try every peer.
    """
    if group.name() == "nccl":
        if group not in _aborted:
            # Its destructor would wait for a thread of torch that may never end after an error.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            _aborted.add(group)  # first: its kernels end
            try:
                start_thread(group.abort, name="abort of NCCL")
            except RuntimeError:  # the interpreter ends
                group.abort()
        return
    # Messages that have begun get some time to arrive: a peer would wait for the rest of one until
    # its timeout, although its connection is closed, unless its epoch ends.
    timeout = _CLOSE_TIMEOUT if current_epoch().connects_at_once else _IN_TRANSFER
    # The sockets of a peer close one by one. A group may have fewer: the last are closed already.
    num_devices = max(NUM_SOCKETS, os.environ.get(INTERFACES, "").count(",") + 1)
    for other, number in itertools.product(range(group.size()), range(num_devices)):
        if other != group.rank():
            _close_connection(group, other, _UNUSED_TAG + number, timeout)


def _close_connection(group: dist.ProcessGroup, other: int, tag: int, timeout: timedelta) -> None:
    """Close a connection after a timeout, until a receive cannot be posted any more.

    Gloo skips a connection that its own thread is using at the moment of the timeout.
    """
    for _ in range(_MAX_CLOSES):
        try:
            received = group.recv([torch.empty(1, dtype=torch.uint8)], other, tag)
        except RuntimeError:
            return
        with contextlib.suppress(RuntimeError):
            received.wait(timeout)
        timeout = _CLOSE_TIMEOUT

"""Move optimizer state and weights to other replicas, after a loss, or when replicas leave or join.

    old.abort()
    model.zero_grad()
    new = DistributedOptimizer(make_optimizer(model), model, buddy=True, for_reshard=True)
    reshard(old, new, model, recovery_group)

All members of the recovery group make the call: those that go on have a new optimizer, those that
have state an old one. What nobody but a lost replica owned comes from its buddy. Each piece of the
state travels to its new owner and its new buddy only, the weights to all that go on.

If a member is lost during the call, the others get a PeerError and may call `reshard` again with
their old optimizers, among themselves: these are valid until all have what they need. A member
whose call has returned keeps its old one as long as another may have to use it again.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from polyrhythm.errors import PeerError, TrainingError, peer_errors
from polyrhythm.run.comm.epoch import current_epoch
from polyrhythm.run.comm.process_groups import DEFAULT_TIMEOUT, abort, all_gather, set_timeout
from polyrhythm.run.decoupled.buckets import (
    ParameterOrder,
    ParameterShard,
    Segment,
    flat_view,
    view_as_parameter,
)
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.run.decoupled.segments import Range, plan_broadcast, plan_transfers
from polyrhythm.run.decoupled.state_dict import flat_state, from_summary, summary_of
from polyrhythm.types import Seconds

_T = TypeVar("_T")
_ACTION = "moving optimizer state to other replicas"


class _Order(msgspec.Struct, frozen=True):
    indices: tuple[int, ...]
    late: frozenset[int]
    num_unseen: int


class _Offer(msgspec.Struct, frozen=True):
    """What one optimizer can offer: the state after so many steps."""

    num_steps: int = 0
    num_replicas: int = 1  # that had its state together
    is_prepared: bool = False
    has_buddies: bool = False
    is_whole: bool = False  # that of a plain optimizer, in epoch 0
    order: _Order | None = None


class _Introduction(msgspec.Struct, frozen=True):
    """The first table of a member: whether it goes on, and its optimizers by epoch."""

    goes_on: bool
    form: str  # of its parameters; "" without any
    sizes: list[int]  # of its parameters
    offers: dict[int, _Offer]


class _Table(msgspec.Struct, frozen=True):
    """The second table of a member: which pieces it holds and wants."""

    own: list[Range] = []
    copies: list[Range] = []
    wanted: list[Range] = []
    summaries: dict[int, dict[str, Any]] = {}  # of the state that it holds, by parameter
    options: list[dict[str, Any]] = []  # of the parameter groups


def reshard(
    old: Optimizer | None,
    new: Optimizer | None,
    model: nn.Module,
    group: dist.ProcessGroup,
    *,
    timeout: Seconds = DEFAULT_TIMEOUT,
) -> int:
    """Move what the `old` optimizers hold into the `new` ones; return the number of their steps.

    `old`: the aborted or closed DistributedOptimizer, or the plain optimizer of a single replica;
    None for a member without state. `new`: a DistributedOptimizer(..., for_reshard=True), or the
    plain optimizer of a single replica; None for a member that only gives. `model`: that of this
    member, whose parameters have the same order in all optimizers. `group`: a gloo group that the
    members use for nothing else; it is unusable after a PeerError.

    A step that is committed on some members is completed on those that have its gradients. Members
    without state also get the buffers, and the weights that no optimizer has. Raises TrainingError
    if a piece is lost with its owner and its buddy.
    """
    set_timeout(group, timeout)
    try:
        return _reshard(dict(_offered(old)), new, model, group, timeout)
    except PeerError:
        abort(group)  # the others need not wait for the timeout
        raise


def _reshard(
    offered: dict[int, Optimizer],
    new: Optimizer | None,
    model: nn.Module,
    group: dist.ProcessGroup,
    timeout: Seconds,
) -> int:
    messages = StateMessages(group, timeout)
    parameters = _parameters_of(next(iter(offered.values()), new))
    offers = {epoch: _offer_of(optimizer) for epoch, optimizer in offered.items()}
    introduction = _Introduction(
        goes_on=new is not None,
        form=_form_of(parameters),
        sizes=[parameter.numel() for parameter in parameters],
        offers=offers,
    )
    members = messages.exchange(introduction, _Introduction)
    epoch, chosen = _choose_epoch(members)
    old = offered.get(epoch) if group.rank() in chosen else None
    num_steps = _agree_on_step(chosen)
    if isinstance(old, DistributedOptimizer):
        if old.num_steps < num_steps:
            old.complete_step()
        old.discard_gradients()
    order = next((offer.order for offer in chosen.values() if offer.order is not None), None)
    held, target = _HeldPieces(old), _Target(new, order)
    tables = messages.exchange(_table_of(held, target), _Table)
    _post_segments(messages, held, target, tables, members, chosen)
    _post_other_tensors(messages, model, old, new, members, chosen)
    messages.wait()
    target.install(next(table.options for table in tables if table.options))
    messages.barrier()  # after an error here, no member has given up its old optimizer
    predecessor = None
    try:
        messages.barrier()  # behind it, all members know that all can go on
    except PeerError:  # the first step notices it, too
        predecessor = old
    if isinstance(new, DistributedOptimizer):
        newest = 1 + max(max(each.offers, default=0) for each in members)
        new.succeed(predecessor, epoch=newest, num_steps=num_steps)
    return num_steps


def _post_segments(
    messages: "StateMessages",
    held: "_HeldPieces",
    target: "_Target",
    tables: Sequence[_Table],
    members: Sequence[_Introduction],
    chosen: Mapping[int, _Offer],
) -> None:
    """Send and receive all pieces of state and weights."""
    own, copies = [table.own for table in tables], [table.copies for table in tables]
    receivers = [rank for rank, each in enumerate(members) if each.goes_on]
    sizes = next(each.sizes for each in members if each.sizes)
    weights = plan_broadcast(own, copies, receivers, sizes)
    if weights.missing:
        raise _loss_error(weights.missing, sizes, chosen)
    summaries: dict[int, dict[str, Any]] = {}
    for table in tables:
        for index, entry in table.summaries.items():
            summaries.setdefault(index, {}).update(entry)
    target.allocate(summaries)
    state = plan_transfers(own, copies, [table.wanted for table in tables])
    for source, receiver, piece in state.transfers:
        for key, summary in sorted(summaries.get(piece.parameter, {}).items()):
            if isinstance(dtype := from_summary(summary), torch.dtype):
                messages.post(
                    *(source, receiver),
                    give=partial(held.state_of, piece, key, dtype),
                    into=partial(target.state_of, piece, key),
                )
    for source, receiver, piece in weights.transfers:
        messages.post(
            *(source, receiver),
            give=partial(held.weights_of, piece),
            into=partial(target.weights_of, piece),
        )


def _post_other_tensors(
    messages: "StateMessages",
    model: nn.Module,
    old: Optimizer | None,
    new: Optimizer | None,
    members: Sequence[_Introduction],
    chosen: Mapping[int, _Offer],
) -> None:
    """Send buffers, and weights that no optimizer has, to members without state."""
    optimized = {*_parameters_of(old or new)}
    others = [p.detach() for p in model.parameters() if p not in optimized]
    for tensor in [*others, *model.buffers()]:
        this = partial(_identity, tensor)
        for rank, each in enumerate(members):
            if each.goes_on and rank not in chosen:
                messages.post(min(chosen), rank, give=this, into=this)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


class StateMessages:
    """The messages of one call; all members post the same ones, in the same order."""

    def __init__(self, group: dist.ProcessGroup, timeout: Seconds) -> None:
        self._group, self._timeout = group, timedelta(seconds=timeout)
        self._num_posted = 0
        # With each receive that does not fill its tensor: where to copy what it has received.
        self._works: list[tuple[int, dist.Work, Tensor, Tensor | None]] = []

    def post(
        self, source: int, receiver: int, *, give: Callable[[], Tensor], into: Callable[[], Tensor]
    ) -> None:
        """Send the tensor of the source, and receive it, if this is one of both members."""
        self._num_posted += 1
        tag, rank = self._num_posted, self._group.rank()
        if source == receiver == rank:
            into().copy_(give())
        elif rank == source:
            sent = give().cpu().contiguous()
            with peer_errors(_name_of(receiver), _ACTION):
                self._works.append((receiver, self._group.send([sent], receiver, tag), sent, None))
        elif rank == receiver:
            tensor = into()
            is_direct = tensor.is_cpu and tensor.is_contiguous()
            received = tensor if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype)
            with peer_errors(_name_of(source), _ACTION):
                work = self._group.recv([received], source, tag)
            self._works.append((source, work, received, None if is_direct else tensor))

    def wait(self) -> None:
        """Wait for all that was posted."""
        current_epoch().wait(self._wait)

    def _wait(self) -> None:
        for peer, work, received, copied in self._works:
            with peer_errors(_name_of(peer), _ACTION):
                work.wait(self._timeout)
            if copied is not None:
                copied.copy_(received)
        self._works.clear()

    def exchange(self, table: _T, kind: type[_T]) -> list[_T]:
        """Return the tables of all members."""
        own = torch.frombuffer(bytearray(msgspec.msgpack.encode(table)), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([own.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: own.numel()] = own
        decoder = msgspec.msgpack.Decoder(kind)
        found = zip(self._all_gather(padded), sizes, strict=True)
        return [decoder.decode(each[:size].numpy().tobytes()) for each, size in found]

    def barrier(self) -> None:
        self._all_gather(torch.zeros(1))

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        with peer_errors("a member of the recovery", _ACTION):
            return all_gather(self._group, tensor)


def _name_of(member: int) -> str:
    return f"member {member} of the recovery"


class _HeldPieces:
    """What this member holds."""

    def __init__(self, old: Optimizer | None) -> None:
        self.segments = [] if old is None else _segments_of(old)
        self.options = [] if old is None else _options_of(old)
        self._by_index: dict[int, list[Segment]] = {}
        for segment in sorted(self.segments, key=lambda each: not each.is_own):
            self._by_index.setdefault(segment.index, []).append(segment)

    def weights_of(self, piece: Range) -> Tensor:
        segment = self._segment_of(piece)
        return segment.weights[piece.start - segment.start : piece.stop - segment.start]

    def state_of(self, piece: Range, key: str, dtype: torch.dtype) -> Tensor:
        segment = self._segment_of(piece)
        if key not in segment.state:  # others count it as 0, too
            return torch.zeros(piece.stop - piece.start, dtype=dtype)
        return segment.state[key][piece.start - segment.start : piece.stop - segment.start]

    def _segment_of(self, piece: Range) -> Segment:
        """Return the one that the plan means: an own one if there is one."""
        return next(
            each
            for each in self._by_index[piece.parameter]
            if each.start <= piece.start and piece.stop <= each.stop
        )


class _Target:
    """What this member gets: state by wanted range, and all weights."""

    def __init__(self, new: Optimizer | None, order: _Order | None) -> None:
        """Make the buckets of `new`; without an order it wants the whole state."""
        self._new = new
        self._parameters = _parameters_of(new)
        self._shards: dict[Range, ParameterShard] = {}
        if isinstance(new, DistributedOptimizer) and order is not None:
            shards = new.make_buckets(ParameterOrder(order.indices, order.late, order.num_unseen))
            self._shards = {Range(s.index, s.start, s.stop): s for s in shards}
        for parameter in self._parameters:
            if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
                parameter.data = parameter.data.contiguous()
        self._flat = [flat_view(parameter) for parameter in self._parameters]
        whole = [Range(i, 0, p.numel()) for i, p in enumerate(self._parameters) if p.numel()]
        self.wanted = list(self._shards) or whole
        self._state: dict[Range, dict[str, Any]] = {}
        self._ranges: dict[int, list[Range]] = {}
        for wanted in self.wanted:
            self._ranges.setdefault(wanted.parameter, []).append(wanted)

    def allocate(self, summaries: Mapping[int, Mapping[str, Any]]) -> None:
        """Make the tensors of the state; each range has its own scalars, which steps change."""
        for wanted in self.wanted:
            entry = self._state[wanted] = {}
            for key, summary in summaries.get(wanted.parameter, {}).items():
                value = from_summary(summary)
                if isinstance(value, torch.dtype):
                    size, device = wanted.stop - wanted.start, self._flat[wanted.parameter].device
                    value = torch.zeros(size, dtype=value, device=device)
                elif isinstance(value, Tensor) and self._counts_on_device(wanted.parameter):
                    value = value.to(self._flat[wanted.parameter].device)
                entry[key] = value

    def weights_of(self, piece: Range) -> Tensor:
        return self._flat[piece.parameter][piece.start : piece.stop]

    def state_of(self, piece: Range, key: str) -> Tensor:
        wanted = next(
            each
            for each in self._ranges[piece.parameter]
            if each.start <= piece.start and piece.stop <= each.stop
        )
        flat: Tensor = self._state[wanted][key]
        return flat[piece.start - wanted.start : piece.stop - wanted.start]

    def install(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Give the new optimizer its state and options."""
        if self._new is None:
            return
        torch.autograd.graph.increment_version(self._parameters)  # the flat views have their own
        own_groups = self._new.param_groups
        groups = [
            {key: like_own(from_summary(value), own.get(key)) for key, value in group.items()}
            for group, own in zip(options, own_groups, strict=True)
        ]
        if self._shards:
            assert isinstance(self._new, DistributedOptimizer), "it has shards"
            entries = [(self._shards[wanted], entry) for wanted, entry in self._state.items()]
            self._new.adopt({s.parameter: entry for s, entry in entries if entry}, groups)
            return
        whole = {wanted.parameter: self._whole_state(wanted) for wanted in self.wanted}
        if isinstance(self._new, DistributedOptimizer):
            self._new.adopt_whole({i: entry for i, entry in whole.items() if entry}, groups)
            return
        numbered = self._new.state_dict()["param_groups"]
        merged = [{**own, **group} for own, group in zip(numbered, groups, strict=True)]
        state_of = {index: entry for index, entry in whole.items() if entry}
        self._new.load_state_dict({"state": state_of, "param_groups": merged})

    def _whole_state(self, wanted: Range) -> dict[str, Any]:
        parameter = self._parameters[wanted.parameter]
        return {
            key: view_as_parameter(value, parameter)
            if isinstance(value, Tensor) and value.dim()
            else value
            for key, value in self._state[wanted].items()
        }

    def _counts_on_device(self, index: int) -> bool:
        return isinstance(self._new, DistributedOptimizer) and self._new.counts_on_device(index)


def _offered(optimizer: Optimizer | None) -> Iterator[tuple[int, Optimizer]]:
    """Yield what a member can offer, by epoch: its optimizer, and the one before if it is kept."""
    if isinstance(optimizer, DistributedOptimizer):
        if not optimizer.needs_reshard:
            yield optimizer.shard_epoch, optimizer
        yield from _offered(optimizer.predecessor)
    elif optimizer is not None:
        yield 0, optimizer


def _offer_of(optimizer: Optimizer) -> _Offer:
    if not isinstance(optimizer, DistributedOptimizer):
        return _Offer(is_whole=True)
    order = optimizer.parameter_order
    return _Offer(
        num_steps=optimizer.num_steps,
        num_replicas=optimizer.num_workers,
        is_prepared=optimizer.is_prepared,
        has_buddies=optimizer.has_buddies,
        order=None if order is None else _Order(order.indices, order.late, order.num_unseen),
    )


def _choose_epoch(members: Sequence[_Introduction]) -> tuple[int, dict[int, _Offer]]:
    """Return the newest epoch of which all members with state have theirs, and their offers.

    A member with all of the state is enough: others may not know that it has got their shards.
    """
    with_state = {rank: each.offers for rank, each in enumerate(members) if each.offers}
    whole = {
        rank: found
        for rank, found in with_state.items()
        if found.keys() == {0} and found[0].is_whole  # not that of an epoch that it has left
    }
    with_state = whole or with_state
    common = set.intersection(*(set(offers) for offers in with_state.values() or [{}]))
    forms = {each.form for each in members if each.form}
    if not common or len(forms) > 1:
        raise TrainingError(
            "members of a recovery without common state"
            if len(forms) < 2
            else "members of a recovery with different models",
            expected="optimizers of the same replicas, or None, with the same parameters",
            fix="restore a checkpoint",
        )
    epoch = max(common)
    return epoch, {rank: offers[epoch] for rank, offers in with_state.items()}


def _agree_on_step(chosen: Mapping[int, _Offer]) -> int:
    """Return the number of steps of all members, when those behind have completed theirs."""
    latest = max(offer.num_steps for offer in chosen.values())
    for rank, offer in chosen.items():
        if latest - offer.num_steps > offer.is_prepared:
            raise TrainingError(
                f"{_name_of(rank)} has made {offer.num_steps} steps, and another one {latest}",
                expected="replicas that stop after the same step",
                fix="pass commit= to DistributedOptimizer: a function that returns when all "
                "replicas have called it; now restore a checkpoint",
            )
    return latest


def _table_of(held: _HeldPieces, target: _Target) -> _Table:
    summaries: dict[int, dict[str, Any]] = {}
    for each in held.segments:
        entry = {key: summary_of(value) for key, value in each.state.items()}
        summaries.setdefault(each.index, {}).update(entry)
    ranges = [(Range(s.index, s.start, s.stop), s.is_own) for s in held.segments]
    return _Table(
        own=[each for each, is_own in ranges if is_own],
        copies=[each for each, is_own in ranges if not is_own],
        wanted=target.wanted,
        summaries=summaries,
        options=[{k: summary_of(v) for k, v in group.items()} for group in held.options],
    )


def _loss_error(
    missing: Sequence[Range], sizes: Sequence[int], chosen: Mapping[int, _Offer]
) -> TrainingError:
    num_replicas = max(offer.num_replicas for offer in chosen.values())
    num_missing = sum(stop - start for _, start, stop in missing)
    has_buddies = all(offer.has_buddies for offer in chosen.values())
    return TrainingError(
        f"{num_replicas - len(chosen)} of {num_replicas} replicas are lost, and with them the "
        f"optimizer state of {num_missing} of {sum(sizes)} weights",
        expected="for each lost replica that the next one is left: it has the copy"
        if has_buddies
        else "buddy=True, which keeps a copy of each shard at the next replica",
        fix="restore a checkpoint, and "
        + ("use more replicas" if has_buddies else "pass buddy=True the next time"),
    )


def _segments_of(optimizer: Optimizer) -> list[Segment]:
    if isinstance(optimizer, DistributedOptimizer):
        return optimizer.held_segments()
    return [
        Segment(index, 0, p.numel(), flat_view(p), flat_state(optimizer.state.get(p, {}), p), True)
        for index, p in enumerate(_parameters_of(optimizer))
        if p.numel()
    ]


def _options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    if isinstance(optimizer, DistributedOptimizer):
        groups = optimizer.whole_param_groups
    else:
        groups = optimizer.param_groups
    return [{k: v for k, v in group.items() if k != "params"} for group in groups]


def _parameters_of(optimizer: Optimizer | None) -> list[nn.Parameter]:
    if isinstance(optimizer, DistributedOptimizer):
        return optimizer.whole_parameters
    groups = [] if optimizer is None else optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]


def _form_of(parameters: Sequence[nn.Parameter]) -> str:
    """Hash the shapes and types of the parameters; "" without any."""
    shown = [(tuple(p.shape), str(p.dtype)) for p in parameters]
    return hashlib.blake2b(repr(shown).encode(), digest_size=8).hexdigest() if shown else ""


def like_own(value: Any, own: Any) -> Any:
    """Return a received option in the type of the own one."""
    if isinstance(value, list) and isinstance(own, tuple):
        return tuple(value)
    return value.to(own.device) if isinstance(value, Tensor) and isinstance(own, Tensor) else value

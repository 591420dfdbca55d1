"""Gather sharded optimizer state as the state_dict of a single worker, and shard it again.

The format is torch's own, so that a checkpoint does not depend on the number of workers or the size
of buckets, and a plain optimizer can load it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.errors import PolicyError
from polyrhythm.run.checkpoint.state import StagedCopies, Staging
from polyrhythm.run.comm.comm_thread import CommThread
from polyrhythm.run.comm.process_groups import Replicas
from polyrhythm.run.comm.reduce_scatter import Collectives, GlooCollectives
from polyrhythm.run.decoupled.buckets import Bucket, ParameterShard
from polyrhythm.types import Seconds

State = dict[int, dict[str, Any]]  # by the index of a parameter
_STEP_COUNTERS = ("step", "eta", "mu", "mu_product")  # of torch's optimizers
# What other workers must know of a value in the state of a shard: a tensor's dtype, a number with
# its dtype and bytes, or anything else itself.
_Summary = tuple[str] | tuple[str, bytes] | tuple[None, Any]


def full_state(
    buckets: Sequence[Bucket],
    state: Mapping[Tensor, Mapping[str, Any]],
    collectives: Collectives,
    replicas: Replicas,
    call: str,
    device: torch.device | None = None,
) -> State:
    """Gather the state of all parameters, on `device` or else on that of the buckets."""
    return {
        index: {key: copied(value) for key, value in entry.items()}
        for gathered in gather_buckets(buckets, state, collectives, replicas, call, device)
        for index, entry in gathered.items()
    }


def gather_buckets(
    buckets: Sequence[Bucket],
    state: Mapping[Tensor, Mapping[str, Any]],
    collectives: Collectives,
    replicas: Replicas,
    call: str,
    device: torch.device | None = None,
    *,
    on_gathered: Callable[[Bucket], None] | None = None,
) -> Iterator[State]:
    """Gather the state of the parameters of each bucket in turn, as views of common memory.

    All workers make this `call` together, with nothing else in flight in `collectives`. The memory
    of a bucket is free when the next one is gathered. `on_gathered` is called when all workers have
    come to this bucket, and have used the state of those before it.
    """
    shards = (shard for bucket in buckets for shard in bucket.shards)
    summaries = {
        s.index: {key: summary_of(value) for key, value in state.get(s.parameter, {}).items()}
        for s in shards
    }
    all_summaries: State = {}
    for received in replicas.all_gather_object(summaries, call):
        for index, summary in received.items():
            values = {key: from_summary(each) for key, each in summary.items()}
            all_summaries.setdefault(index, {}).update(values)
    for bucket in buckets:
        entries = {index: all_summaries.pop(index, {}) for index in bucket.parameters}
        keys = dict.fromkeys(
            k for e in entries.values() for k, v in e.items() if isinstance(v, torch.dtype)
        )
        for key in keys:
            dtype = next(entry[key] for entry in entries.values() if key in entry)
            flat = _gather(bucket, key, state, collectives, dtype=dtype, device=device)
            if on_gathered is not None:
                on_gathered(bucket)
            for index, entry in entries.items():
                if key in entry:
                    entry[key] = bucket.view_of(flat, index)
            del flat
        yield {index: entry for index, entry in entries.items() if entry}
        del entries  # before the next bucket is gathered


def copy_state_to_cpu(
    buckets: Sequence[Bucket], state: Mapping[Tensor, Mapping[str, Any]], staging: Staging
) -> tuple[dict[Tensor, dict[str, Any]], StagedCopies]:
    """Start to copy this worker's state to the CPU, where no step changes it.

    A step may change the state after `StagedCopies.wait_on_device`; the copies are complete after
    `StagedCopies.wait`.
    """
    shards = [s for bucket in buckets for s in bucket.shards if s.parameter in state]
    tensors = {
        _copy_name(number, key): value.detach()
        for number, shard in enumerate(shards)
        for key, value in state[shard.parameter].items()
        if isinstance(value, Tensor)
    }
    copies = staging.copy_to_host(tensors, kept=tensors)
    entries: dict[Tensor, dict[str, Any]] = {
        shard.parameter: {
            key: copies.tensors.get(_copy_name(number, key), value)
            for key, value in state[shard.parameter].items()
        }
        for number, shard in enumerate(shards)
    }
    return entries, copies


def _copy_name(number: int, key: str) -> str:
    return f"{number}.{key}"


class BackgroundGather:
    """Gather optimizer state while training continues, in a separate thread and process group.

    A checkpoint needs the whole state, of which each worker has a shard. Training waits only for
    the copy of its own shard, on a GPU not before the next update and without the host; not for
    the gather: over slow links that takes longer than a step. Gathers run one after the other; all
    workers create this, and start each gather.
    """

    def __init__(self, ranks: Sequence[int], device: torch.device, *, timeout: Seconds) -> None:
        """`device`: of the parameters, whose copies the thread waits for."""
        self.replicas = Replicas(ranks, "gathering state", timeout=timeout)
        self.thread = CommThread([self.replicas.group], timeout=timeout)
        if device.type == "cuda":  # otherwise the thread would use memory of the first GPU
            self.thread.start(partial(torch.cuda.set_device, device))
        self._timeout = timeout
        # Kept between gathers: to allocate memory takes longer than to copy. Each gather that is in
        # progress has its own.
        self.unused_memory: list[Staging] = []

    def take_memory(self) -> Staging:
        """Return memory for copies; append it to `unused_memory` after the gather."""
        return self.unused_memory.pop() if self.unused_memory else Staging()

    def collectives(self, shard_owners: Sequence[int] | None) -> Collectives:
        """Return the collectives for a gather from the replicas that own the shards."""
        names = [f"rank {rank}" for rank in self.replicas.ranks]
        return GlooCollectives(
            self.replicas.group, timeout=self._timeout, owners=shard_owners, names=names
        )


def unsharded_param_groups(
    groups: Sequence[Mapping[str, Any]], group_of: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the groups as in a state_dict: options and parameter indices.

    `group_of` gives the group of each parameter.
    """
    unsharded = [{k: copied(v) for k, v in group.items() if k != "params"} for group in groups]
    for number, group in enumerate(unsharded):
        group["params"] = [index for index, owner in enumerate(group_of) if owner == number]
    return unsharded


def shard_state(
    full: Mapping[str, Any], shard: ParameterShard, parameter: nn.Parameter, *, fused: bool
) -> dict[str, Any]:
    """Cut a shard's state from its parameter's; `fused` optimizers count steps on the GPU."""
    state: dict[str, Any] = {}
    for key, value in full.items():
        if not _is_shared_scalar(key, value, parameter):
            state[key] = _flat_in_memory_order(value, parameter)[shard.start : shard.stop].clone()
        elif isinstance(value, Tensor):
            state[key] = value.to(parameter.device if fused else "cpu", copy=True)
        else:
            state[key] = value
    return state


def flat_state(full: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Flatten the state of a whole parameter in its memory order."""
    return {
        key: value
        if _is_shared_scalar(key, value, parameter)
        else _flat_in_memory_order(value, parameter)
        for key, value in full.items()
    }


def check_groups(groups: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> None:
    """Refuse `groups` of a checkpoint whose sizes differ from `counts`, this optimizer's."""
    sizes = [len(group["params"]) for group in groups]
    if sizes != list(counts):
        raise PolicyError(
            f"a checkpoint with parameter groups of {sizes}",
            expected=f"groups of {list(counts)}, as in this optimizer",
            fix="load a checkpoint of the same model and the same groups",
        )


def check_state(full: State, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
    """Refuse the state of another model."""
    for index, entry in full.items():
        if not 0 <= index < len(parameters):
            raise PolicyError(
                f"a checkpoint with state for parameter {index}",
                expected=f"at most {len(parameters)} parameters, as in this optimizer",
                fix="load a checkpoint of the same model",
            )
        shape = tuple(parameters[index].shape)
        for key, value in entry.items():
            is_scalar = _is_shared_scalar(key, value, parameters[index])
            if not is_scalar and tuple(value.shape) != shape:
                raise PolicyError(
                    f"{key} of {names[index]} has shape {tuple(value.shape)} in the checkpoint",
                    expected=f"shape {shape}, as the parameter",
                    fix="load a checkpoint of the same model",
                )


def cast_state(full: State, parameters: Sequence[nn.Parameter]) -> State:
    """Cast each parameter's state to its dtype, as torch does when it loads a checkpoint."""
    return {
        index: {
            key: value.to(parameters[index].dtype)
            if parameters[index].is_floating_point()
            and not _is_shared_scalar(key, value, parameters[index])
            else value
            for key, value in entry.items()
        }
        for index, entry in full.items()
    }


def _gather(
    bucket: Bucket,
    key: str,
    state: Mapping[Tensor, Mapping[str, Any]],
    collectives: Collectives,
    *,
    dtype: torch.dtype,
    device: torch.device | None,
) -> Tensor:
    flat = torch.zeros(bucket.size, dtype=dtype, device=device or bucket.device)
    for shard in bucket.shards:
        value = state.get(shard.parameter, {}).get(key)
        if value is not None:
            start = bucket.offsets[shard.index] + shard.start
            flat[start : start + value.numel()] = value
    if not bucket.is_all_reduce:
        gathered = collectives.all_gather(flat, bucket.number)
        gathered.wait()
        gathered.join()
        collectives.confirm()
    return flat


def _is_scalar(value: Any) -> bool:
    """Whether a value in the state of a shard is a single number, as a count of steps."""
    return not isinstance(value, Tensor) or value.dim() == 0


def _is_shared_scalar(key: str, value: Any, parameter: nn.Parameter) -> bool:
    """The same in the state of a whole parameter, which may itself be a scalar."""
    return _is_scalar(value) and (
        parameter.dim() > 0 or key in _STEP_COUNTERS or not isinstance(value, Tensor)
    )


def on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def summary_of(value: Any) -> _Summary:
    if not isinstance(value, Tensor):
        return None, value
    dtype = str(value.dtype).removeprefix("torch.")
    if not _is_scalar(value):
        return (dtype,)
    return dtype, value.detach().cpu().reshape(1).view(torch.uint8).numpy().tobytes()


def from_summary(summary: _Summary) -> Any:
    """Return a value, or the dtype of a tensor."""
    if summary[0] is None:
        return summary[1]
    dtype = getattr(torch, summary[0])
    if len(summary) == 1:
        return dtype
    return torch.frombuffer(bytearray(summary[1]), dtype=dtype).reshape(())


def _flat_in_memory_order(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Flatten `value` in the memory order of the parameter."""
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):  # not in a bucket yet
        return value.to(parameter.device).reshape(-1)
    shape, stride = parameter.shape, parameter.stride()
    placed = torch.empty_strided(shape, stride, dtype=value.dtype, device=parameter.device)
    placed.copy_(value)
    return placed.as_strided((parameter.numel(),), (1,))

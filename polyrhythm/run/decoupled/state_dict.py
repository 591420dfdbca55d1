"""Optimizer state as if there were one worker: what segments have, put together, and cut again.

In the form of torch's own `state_dict`, so that a checkpoint does not depend on the number of
workers or the size of buckets, and a plain optimizer can load it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.errors import PolicyError
from polyrhythm.run.comm.reduce_scatter import Collectives
from polyrhythm.run.decoupled.buckets import Bucket, ParameterShard

State = dict[int, dict[str, Any]]  # by the index of a parameter
_STEP_COUNTERS = ("step", "eta", "mu", "mu_product")  # of torch's optimizers
AllGatherObject = Callable[
    [Any, str], list[Any]
]  # what all workers give, by rank, in a call of all


def full_state(
    buckets: Sequence[Bucket],
    state: Mapping[Tensor, Mapping[str, Any]],
    collectives: Collectives,
    all_gather_object: AllGatherObject,
    what: str,
    device: torch.device | None = None,
) -> State:
    """Of all parameters; called by all workers together, with nothing else on its way in `collectives`.

    It is put together on `device`, or else on that of the buckets.
    """
    shards = (shard for bucket in buckets for shard in bucket.shards)
    mine = {s.index: state.get(s.parameter, {}) for s in shards}
    summaries = {
        index: {key: _summary(value) for key, value in of.items()} for index, of in mine.items()
    }
    all_summaries: State = {}
    for theirs in all_gather_object(summaries, what):
        for index, of in theirs.items():
            all_summaries.setdefault(index, {}).update(of)
    found: State = {}
    for bucket in buckets:
        known = {index: all_summaries.get(index, {}) for index in bucket.parameters}
        keys = dict.fromkeys(k for of in known.values() for k, v in of.items() if _is_type(v))
        for key in keys:
            dtype = next(of[key] for of in known.values() if key in of)
            full = _gather(bucket, key, state, collectives, dtype=dtype, device=device)
            for index, of in known.items():
                if key in of:
                    of[key] = bucket.view_of(full, index).clone()
        found |= {index: of for index, of in known.items() if of}
    return found


def copy_state_to_cpu(
    buckets: Sequence[Bucket], state: Mapping[Tensor, Mapping[str, Any]]
) -> dict[Tensor, dict[str, Any]]:
    """What this worker has, on the CPU, where no step changes it."""
    return {
        s.parameter: {key: _copied(value) for key, value in state[s.parameter].items()}
        for bucket in buckets
        for s in bucket.shards
        if s.parameter in state
    }


def unsharded_param_groups(
    groups: Sequence[Mapping[str, Any]], group_of: Sequence[int]
) -> list[dict[str, Any]]:
    """As `state_dict` has them: options, and the indices of parameters, of which each has one."""
    found = [{k: _cloned(v) for k, v in of.items() if k != "params"} for of in groups]
    for number, of in enumerate(found):
        of["params"] = [index for index, group in enumerate(group_of) if group == number]
    return found


def shard_state(
    full: Mapping[str, Any], shard: ParameterShard, parameter: nn.Parameter, *, fused: bool
) -> dict[str, Any]:
    """What a segment has of its parameter's state; `fused` optimizers count steps on the GPU."""
    found: dict[str, Any] = {}
    for key, value in full.items():
        if not _is_shared_scalar(key, value, parameter):
            found[key] = _flat_in_memory_order(value, parameter)[shard.start : shard.stop].clone()
        elif isinstance(value, Tensor):
            found[key] = value.to(parameter.device if fused else "cpu", copy=True)
        else:
            found[key] = value
    return found


def check_groups(groups: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> None:
    """`groups` are those of a checkpoint, `counts` the parameters in each of this optimizer's."""
    sizes = [len(of["params"]) for of in groups]
    if sizes != list(counts):
        raise PolicyError(
            f"a checkpoint with parameter groups of {sizes}",
            expected=f"groups of {list(counts)}, as this optimizer has",
            fix="load the checkpoint of the same model and the same groups",
        )


def check_state(full: State, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
    """Refuse the state of another model."""
    for index, of in full.items():
        if not 0 <= index < len(parameters):
            raise PolicyError(
                f"a checkpoint with state for parameter {index}",
                expected=f"at most {len(parameters)} parameters, as this optimizer has",
                fix="load the checkpoint of the same model",
            )
        shape = tuple(parameters[index].shape)
        for key, value in of.items():
            is_one = _is_shared_scalar(key, value, parameters[index])
            if not is_one and tuple(value.shape) != shape:
                raise PolicyError(
                    f"{key} of {names[index]} has shape {tuple(value.shape)} in the checkpoint",
                    expected=f"shape {shape}, as the parameter",
                    fix="load the checkpoint of the same model",
                )


def cast_state(full: State, parameters: Sequence[nn.Parameter]) -> State:
    """As torch loads a checkpoint: numbers of a parameter get its type."""
    return {
        index: {
            key: value.to(parameters[index].dtype)
            if parameters[index].is_floating_point()
            and not _is_shared_scalar(key, value, parameters[index])
            else value
            for key, value in of.items()
        }
        for index, of in full.items()
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
    flat = torch.zeros(len(bucket.weights), dtype=dtype, device=device or bucket.weights.device)
    for shard in bucket.shards:
        value = state.get(shard.parameter, {}).get(key)
        if value is not None:
            start = bucket.offsets[shard.index] + shard.start
            flat[start : start + value.numel()] = value
    if not bucket.is_all_reduce:
        collectives.all_gather(flat, bucket.number).wait()
    return flat


def _is_scalar(value: Any) -> bool:
    """In the state of a segment, which has a dimension: a count of steps, say."""
    return not isinstance(value, Tensor) or value.dim() == 0


def _is_shared_scalar(key: str, value: Any, parameter: nn.Parameter) -> bool:
    """The same in the state of a whole parameter, which may have none itself."""
    is_number = _is_scalar(value)
    return is_number and (
        parameter.dim() > 0 or key in _STEP_COUNTERS or not isinstance(value, Tensor)
    )


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _summary(value: Any) -> Any:
    """What the others need to know: all of a single number, else its type."""
    if not _is_scalar(value):
        return value.dtype
    return value.cpu() if isinstance(value, Tensor) else value


def _is_type(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _flat_in_memory_order(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Flat, in the order in which the parameter lies in memory."""
    shape, stride = parameter.shape, parameter.stride()
    placed = torch.empty_strided(shape, stride, dtype=value.dtype, device=parameter.device)
    placed.copy_(value)
    return placed.as_strided((parameter.numel(),), (1,))

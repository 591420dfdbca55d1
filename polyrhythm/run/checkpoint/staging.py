"""Copies of a stage's tensors in CPU memory, which training cannot change while they are written.

The memory is kept from save to save: to get it anew takes longer than the copy. For a GPU it is
pinned, so that copies run at the speed of the bus.
"""

from typing import Any

import torch
from torch import Tensor

Nested = dict[str, Any]  # of tensors, by name


class Staging:
    def __init__(self) -> None:
        self._copies: Nested = {}

    def copy_to_host(self, tensors: Nested) -> Nested:
        """All copies are made when this returns; they are valid until the next call."""
        self._copies = _copy(tensors, self._copies)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return self._copies

    def clear(self) -> None:
        self._copies = {}


def _copy(tensors: Nested, into: Nested) -> Nested:
    copies: Nested = {}
    for name, value in tensors.items():
        kept = into.get(name)
        if isinstance(value, dict):
            copies[name] = _copy(value, kept if isinstance(kept, dict) else {})
            continue
        if not isinstance(kept, Tensor) or _kind(kept) != _kind(value):
            kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        copies[name] = kept.copy_(value, non_blocking=True)
    return copies


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype

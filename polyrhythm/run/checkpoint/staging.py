"""Copies of a stage's tensors in CPU memory, which training does not change during the write.

The memory is reused from save to save: allocating it takes longer than the copy. For a GPU it is
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
        """Copy the tensors; the copies are complete on return and valid until the next call."""
        self._copies = _copy(tensors, self._copies)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return self._copies

    def clear(self) -> None:
        self._copies = {}


def _copy(tensors: Nested, into: Nested) -> Nested:
    copies: Nested = {}
    for name, value in tensors.items():
        copy = into.get(name)
        if isinstance(value, dict):
            copies[name] = _copy(value, copy if isinstance(copy, dict) else {})
            continue
        if not isinstance(copy, Tensor) or _kind(copy) != _kind(value):
            copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        copies[name] = copy.copy_(value, non_blocking=True)
    return copies


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype

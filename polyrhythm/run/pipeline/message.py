"""A message between stages: tensors and the time of sending in one flat buffer.

There is one message per micro-batch, peer and direction, whatever number of tensors it carries: the
network has one transfer, which can be timed. Sender and receiver share a `MessageLayout`; it is
announced once for every kind of micro-batch, before the first message of that kind.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import msgspec
import torch
from torch import Tensor

from polyrhythm.errors import PlanError
from polyrhythm.types import Bytes, Seconds

HEADER_BYTES: Bytes = 64  # the time of sending, padded so that the tensors are aligned
ANNOUNCEMENT_BYTES: Bytes = 4096  # a layout on the wire: enough for about fifty tensors
_ALIGNMENT: Bytes = 64


class _Spec(msgspec.Struct, frozen=True, array_like=True):
    shape: tuple[int, ...]
    dtype: str  # as torch names it, without "torch."
    needs_grad: bool


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """The tensors of one message: shapes, dtypes, and which of them need a gradient."""

    specs: tuple[_Spec, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Self:
        return cls(
            tuple(
                _Spec(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad)
                for t in tensors
            )
        )

    @property
    def gradient(self) -> "MessageLayout":
        """The layout of the gradients of this message."""
        needing = (spec for spec in self.specs if spec.needs_grad)
        return MessageLayout(tuple(_Spec(spec.shape, spec.dtype, False) for spec in needing))

    @property
    def nbytes(self) -> Bytes:
        return HEADER_BYTES + sum(_padded_size(spec) for spec in self.specs)

    @property
    def description(self) -> str:
        """The layout as text, for error messages."""
        return ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in self.specs) or "nothing"

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return tensors that share the memory of a buffer of `nbytes`, but are no views of it.

        Views share a version counter: autograd would refuse one after a change of another.
        """
        tensors, offset = [], HEADER_BYTES
        for spec in self.specs:
            tensor = torch.empty(0, dtype=getattr(torch, spec.dtype), device=buffer.device)
            start = (buffer.storage_offset() + offset) // tensor.element_size()
            shape = torch.Size(spec.shape)
            stride = torch.empty(shape, device="meta").stride()
            tensors.append(tensor.set_(buffer.untyped_storage(), start, shape, stride))
            offset += _padded_size(spec)
        return tensors

    def pack(self, tensors: Sequence[Tensor], buffer: Tensor) -> None:
        """Copy the tensors into the buffer; from a GPU without waiting for the copies."""
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor, non_blocking=True)

    def announcement(self) -> Tensor:
        payload = msgspec.msgpack.encode(self.specs)
        if len(payload) > ANNOUNCEMENT_BYTES - 4:
            raise PlanError(
                f"a stage passes {len(self.specs)} tensors to another",
                expected=f"at most {ANNOUNCEMENT_BYTES} bytes of layout: about fifty tensors",
                fix="stack or concatenate tensors before the stage returns them",
            )
        return pad_bytes(payload, ANNOUNCEMENT_BYTES)

    @classmethod
    def from_announcement(cls, message: Tensor) -> Self:
        return cls(msgspec.msgpack.decode(unpad_bytes(message), type=tuple[_Spec, ...]))


def pad_bytes(payload: bytes, nbytes: Bytes) -> Tensor:
    """Pad bytes to a message of fixed size, which a receiver can post without a layout."""
    assert len(payload) <= nbytes - 4, "the sender checks the size"
    message = bytearray(nbytes)
    message[: 4 + len(payload)] = struct.pack("<I", len(payload)) + payload
    return torch.frombuffer(message, dtype=torch.uint8)


def unpad_bytes(message: Tensor) -> bytes:
    raw = message.numpy().tobytes()
    (length,) = struct.unpack_from("<I", raw)
    return raw[4 : 4 + length]


def write_timestamp(buffer: Tensor, time: Seconds) -> None:
    """Write the time of sending into the header, just before the send."""
    buffer[:8].view(torch.float64).fill_(time)


def read_timestamp(buffer: Tensor) -> Seconds:
    return buffer[:8].view(torch.float64).item()


def _size(spec: _Spec) -> Bytes:
    return prod(spec.shape) * getattr(torch, spec.dtype).itemsize


def _padded_size(spec: _Spec) -> Bytes:
    return -(-_size(spec) // _ALIGNMENT) * _ALIGNMENT

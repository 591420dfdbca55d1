"""What crosses from stage to stage: some tensors and the time they were sent, as one flat buffer.

One message per micro-batch, peer and direction, however many tensors it carries: the network sees
one transfer, and its time can be taken. Sender and receiver share a `MessageLayout`; it is announced once
for every kind of micro-batch, before the first message of that kind.
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

HEADER_BYTES: Bytes = 64  # the time of sending, and room to keep the tensors behind it aligned
ANNOUNCEMENT_BYTES: Bytes = (
    4096  # a layout on the wire; this many bytes describe some fifty tensors
)
_ALIGNMENT: Bytes = 64


class _Spec(msgspec.Struct, frozen=True, array_like=True):
    shape: tuple[int, ...]
    dtype: str  # as torch names it, without "torch."
    needs_grad: bool


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """The tensors of one message: shapes, types, and which of them a gradient comes back for."""

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
        """The layout of what comes back."""
        needing = (spec for spec in self.specs if spec.needs_grad)
        return MessageLayout(tuple(_Spec(spec.shape, spec.dtype, False) for spec in needing))

    @property
    def nbytes(self) -> Bytes:
        return HEADER_BYTES + sum(_padded_size(spec) for spec in self.specs)

    @property
    def description(self) -> str:
        """For messages to people."""
        return ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in self.specs) or "nothing"

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors inside a buffer of `nbytes`: they share its memory, but no view of it does.

        Views would share a version counter, and autograd would refuse one after another changed.
        """
        found, offset = [], HEADER_BYTES
        for spec in self.specs:
            tensor = torch.empty(0, dtype=getattr(torch, spec.dtype), device=buffer.device)
            start = (buffer.storage_offset() + offset) // tensor.element_size()
            shape = torch.Size(spec.shape)
            stride = torch.empty(shape, device="meta").stride()
            found.append(tensor.set_(buffer.untyped_storage(), start, shape, stride))
            offset += _padded_size(spec)
        return found

    def pack(self, tensors: Sequence[Tensor], buffer: Tensor) -> None:
        """Copy into the buffer; from a GPU without waiting for the copies."""
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor, non_blocking=True)

    def announcement(self) -> Tensor:
        payload = msgspec.msgpack.encode(self.specs)
        if len(payload) > ANNOUNCEMENT_BYTES - 4:
            raise PlanError(
                f"a stage passes {len(self.specs)} tensors to another",
                expected=f"as many as can be described in {ANNOUNCEMENT_BYTES} bytes, about fifty",
                fix="stack or concatenate tensors before they leave the stage",
            )
        return pad_bytes(payload, ANNOUNCEMENT_BYTES)

    @classmethod
    def from_announcement(cls, message: Tensor) -> Self:
        return cls(msgspec.msgpack.decode(unpad_bytes(message), type=tuple[_Spec, ...]))


def pad_bytes(payload: bytes, nbytes: Bytes) -> Tensor:
    """Bytes as a message of a fixed size, which a receiver can wait for without knowing more."""
    assert len(payload) <= nbytes - 4, "the sender checks what it tells"
    whole = bytearray(nbytes)
    whole[: 4 + len(payload)] = struct.pack("<I", len(payload)) + payload
    return torch.frombuffer(whole, dtype=torch.uint8)


def unpad_bytes(message: Tensor) -> bytes:
    whole = message.numpy().tobytes()
    (length,) = struct.unpack_from("<I", whole)
    return whole[4 : 4 + length]


def write_timestamp(buffer: Tensor, time: Seconds) -> None:
    """Write the time of sending into the header, at the last moment."""
    buffer[:8].view(torch.float64).fill_(time)


def read_timestamp(buffer: Tensor) -> Seconds:
    return buffer[:8].view(torch.float64).item()


def _size(spec: _Spec) -> Bytes:
    return prod(spec.shape) * getattr(torch, spec.dtype).itemsize


def _padded_size(spec: _Spec) -> Bytes:
    return -(-_size(spec) // _ALIGNMENT) * _ALIGNMENT

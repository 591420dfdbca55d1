"""Tensors of every dtype are sent as one flat buffer, described by an announced layout.

Copies are small and start no threads: this process forks workers in other tests.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyrhythm.errors import PlanError
from polyrhythm.run.pipeline.transport import (
    ANNOUNCEMENT_BYTES,
    TIMESTAMP_BYTES,
    MessageLayout,
    pad_bytes,
    read_timestamp,
    unpad_bytes,
    write_timestamp,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)  # () has one element, (3, 0) none
descriptions = st.lists(
    st.tuples(st.sampled_from(DTYPES), shapes, st.booleans(), st.integers(0, 1000)), max_size=8
)


def tensor(dtype: torch.dtype, shape: tuple[int, ...], needs_grad: bool, seed: int) -> Tensor:
    """Make a tensor of arbitrary bits, including infinities and NaN."""
    random = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=random).bool()
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (num_bytes,), generator=random).to(torch.uint8)
    values = bits.view(dtype).view(shape)
    return values.requires_grad_(needs_grad and (dtype.is_floating_point or dtype.is_complex))


def bits_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def transferred(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors that a receiver reads from the announcement and the buffer."""
    layout = MessageLayout.of(tensors)
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.pack([item.detach() for item in tensors], buffer)
    write_timestamp(buffer, 0.0)
    announcement = layout.announcement()
    assert announcement.shape == (ANNOUNCEMENT_BYTES,), "a receiver must know its size"
    return MessageLayout.from_announcement(announcement).views(buffer.clone())


@given(descriptions)
def test_tensors_of_every_dtype_and_shape_are_bit_exact(
    drawn: list[tuple[torch.dtype, tuple[int, ...], bool, int]],
) -> None:
    sent = [tensor(*item) for item in drawn]
    received = transferred(sent)
    assert [(r.dtype, r.shape) for r in received] == [(s.dtype, s.shape) for s in sent]
    assert [bits_of(r) for r in received] == [bits_of(s) for s in sent]


@given(descriptions)
def test_layout_survives_its_announcement(
    drawn: list[tuple[torch.dtype, tuple[int, ...], bool, int]],
) -> None:
    tensors = [tensor(*item) for item in drawn]
    layout = MessageLayout.of(tensors)
    assert MessageLayout.from_announcement(layout.announcement()) == layout
    assert [spec.needs_grad for spec in layout.specs] == [t.requires_grad for t in tensors]
    needing = [item for item in tensors if item.requires_grad]
    assert [spec.shape for spec in layout.gradient.specs] == [tuple(t.shape) for t in needing]


@given(descriptions)
def test_tensors_in_buffer_are_aligned_and_disjoint(
    drawn: list[tuple[torch.dtype, tuple[int, ...], bool, int]],
) -> None:
    layout = MessageLayout.of([tensor(*item) for item in drawn])
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    stop = TIMESTAMP_BYTES
    for view in layout.views(buffer):
        start = view.storage_offset() * view.element_size()
        assert start % 64 == 0 or not view.numel()
        assert start >= stop or not view.numel()
        stop = max(stop, start + view.numel() * view.element_size())
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert stop <= layout.nbytes


def test_non_contiguous_tensors_are_packed() -> None:
    square = torch.arange(12.0).view(3, 4)
    sent = [square.T, square[:, ::2], torch.tensor(7.0).expand(5)]
    assert all(torch.equal(a, b) for a, b in zip(transferred(sent), sent, strict=True))


def test_timestamp_is_sent_with_tensors() -> None:
    layout = MessageLayout.of([torch.zeros(3, dtype=torch.int64)])
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.pack([torch.tensor([1, 2, 3])], buffer)
    write_timestamp(buffer, 123456.789012345)
    assert read_timestamp(buffer) == 123456.789012345
    assert layout.views(buffer)[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)), b"\0" * 1020])
def test_bytes_are_padded_to_fixed_size(payload: bytes) -> None:
    message = pad_bytes(payload, 1024)
    assert message.shape == (1024,)
    assert unpad_bytes(message) == payload


def test_too_many_tensors_for_announcement_are_refused() -> None:
    fifty = [torch.zeros(2, 3, 4) for _ in range(50)]
    assert (
        MessageLayout.from_announcement(MessageLayout.of(fifty).announcement()).nbytes
        == MessageLayout.of(fifty).nbytes
    )
    with pytest.raises(PlanError, match="2000 tensors"):
        MessageLayout.of([torch.zeros(2)] * 2000).announcement()

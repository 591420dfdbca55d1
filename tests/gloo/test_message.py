"""Tensors of every type cross as one flat buffer, described by a layout that is announced once.

Small copies only, which start no threads: this process forks workers in other tests.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyrhythm.errors import PlanError
from polyrhythm.run.pipeline.message import (
    ANNOUNCEMENT,
    HEADER,
    Layout,
    padded,
    stamp,
    stamped,
    unpadded,
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
    """Arbitrary bits, infinities and NaN among them."""
    random = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=random).bool()
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (num_bytes,), generator=random).to(torch.uint8)
    made = bits.view(dtype).view(shape)
    return made.requires_grad_(needs_grad and (dtype.is_floating_point or dtype.is_complex))


def bits_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def crossed(tensors: list[Tensor]) -> list[Tensor]:
    """What a receiver finds, who knows the announcement and the buffer."""
    layout = Layout.of(tensors)
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.pack([one.detach() for one in tensors], buffer)
    stamp(buffer, 0.0)
    announcement = layout.announcement()
    assert announcement.shape == (ANNOUNCEMENT,), "a receiver can wait for it knowing nothing"
    return Layout.announced(announcement).views(buffer.clone())


@given(descriptions)
def test_tensors_of_every_type_and_shape_cross_to_the_bit(
    drawn: list[tuple[torch.dtype, tuple[int, ...], bool, int]],
) -> None:
    sent = [tensor(*one) for one in drawn]
    received = crossed(sent)
    assert [(r.dtype, r.shape) for r in received] == [(s.dtype, s.shape) for s in sent]
    assert [bits_of(r) for r in received] == [bits_of(s) for s in sent]


@given(descriptions)
def test_an_announced_layout_is_the_layout(
    drawn: list[tuple[torch.dtype, tuple[int, ...], bool, int]],
) -> None:
    tensors = [tensor(*one) for one in drawn]
    layout = Layout.of(tensors)
    assert Layout.announced(layout.announcement()) == layout
    assert [spec.needs_grad for spec in layout.specs] == [t.requires_grad for t in tensors]
    needing = [one for one in tensors if one.requires_grad]
    assert [spec.shape for spec in layout.gradient.specs] == [tuple(t.shape) for t in needing]


@given(descriptions)
def test_tensors_in_a_buffer_are_aligned_and_apart(
    drawn: list[tuple[torch.dtype, tuple[int, ...], bool, int]],
) -> None:
    layout = Layout.of([tensor(*one) for one in drawn])
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    ends = HEADER
    for view in layout.views(buffer):
        begins = view.storage_offset() * view.element_size()
        assert begins % 64 == 0 or not view.numel()
        assert begins >= ends or not view.numel()
        ends = max(ends, begins + view.numel() * view.element_size())
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert ends <= layout.nbytes


def test_tensors_that_do_not_lie_in_one_piece_are_packed() -> None:
    square = torch.arange(12.0).view(3, 4)
    sent = [square.T, square[:, ::2], torch.tensor(7.0).expand(5)]
    assert all(torch.equal(a, b) for a, b in zip(crossed(sent), sent, strict=True))


def test_the_time_of_sending_crosses_beside_the_tensors() -> None:
    layout = Layout.of([torch.zeros(3, dtype=torch.int64)])
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.pack([torch.tensor([1, 2, 3])], buffer)
    stamp(buffer, 123456.789012345)
    assert stamped(buffer) == 123456.789012345
    assert layout.views(buffer)[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("told", [b"", b"x", bytes(range(256)), b"\0" * 1020])
def test_bytes_cross_in_a_message_of_fixed_size(told: bytes) -> None:
    message = padded(told, 1024)
    assert message.shape == (1024,)
    assert unpadded(message) == told


def test_more_tensors_than_can_be_announced_are_refused() -> None:
    fifty = [torch.zeros(2, 3, 4) for _ in range(50)]
    assert Layout.announced(Layout.of(fifty).announcement()).nbytes == Layout.of(fifty).nbytes
    with pytest.raises(PlanError, match=r"passes 2000 tensors(?s:.*)stack or concatenate"):
        Layout.of([torch.zeros(2)] * 2000).announcement()

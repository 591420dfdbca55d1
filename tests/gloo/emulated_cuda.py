"""Streams and pinned memory of a GPU, emulated on a CPU: all copies act at once."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch


def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let copies and streams of a GPU act at once, in main memory."""
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    for name in ("Stream", "Event", "current_stream", "set_device", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())

"""A disk that fills up, and the warnings of saves."""

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def record_warnings() -> Iterator[list[str]]:
    """Collect the texts of warnings, including those of other threads."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
        texts += [str(each.message) for each in caught]


def mount_small_disk(folder: Path, size: str) -> str | None:
    """Mount a tmpfs of `size` for this process only; return the problem, if any."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, new_mounts, new_user = os.getuid(), 0x20000, 0x10000000
    if libc.unshare(new_mounts | (new_user if user else 0)):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    if user:
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    private = 0x4000 | 0x40000  # recursively
    if libc.mount(b"none", b"/", None, private, None) or libc.mount(
        b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()
    ):
        return f"mount: {os.strerror(ctypes.get_errno())}"
    return None

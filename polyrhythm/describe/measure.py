"""Measure the operations per second of a device by a product of matrices. [torch]

`probe` measures every device of a cluster in this way, and `profile` its own device: the ratio of
the two is the speed of a device relative to a profile.
"""

import platform
import time
from pathlib import Path

import torch

from polyrhythm.describe.sample import Sample
from polyrhythm.errors import DescriptionError, LaunchError, is_out_of_memory
from polyrhythm.types import Seconds

_SMALLEST, _LARGEST = 256, 16_384  # rows of a matrix; the largest takes 1 GiB in float32
_LONG_ENOUGH: Seconds = 0.05  # for a product forward and backward: its launch is negligible then


def device_flops(device: torch.device, dtype: torch.dtype, *, repeat: int) -> Sample:
    """Return operations per second of a product of square matrices, forward and backward.

    Raises DescriptionError for a device that cannot compute even a small product.
    """
    try:
        size = _fitting_size(device, dtype)
        operations = product_operations(size)
        return Sample.of([operations / product(size, device, dtype) for _ in range(repeat)])
    except RuntimeError as error:  # out of memory too
        message = str(error).strip().splitlines()[0]
        raise DescriptionError(
            f"{device} cannot multiply matrices of {dtype}: {message}",
            expected="a device with free memory that computes with this type of number",
            fix="end what else uses the device, or try --dtype float32 or --device cpu",
        ) from None


def product_operations(size: int) -> int:
    """Count a product of square matrices: n^3 multiplications and additions, and twice backward."""
    return 6 * size**3


def product(size: int, device: torch.device, dtype: torch.dtype) -> Seconds:
    """Return the duration of a product of square matrices, forward and backward."""
    # Random: a GPU multiplies equal numbers with less power, and so faster than a model's.
    left, right, gradient = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(3))
    with torch.enable_grad():
        left.requires_grad_()
        right.requires_grad_()
        finish(device)
        start = time.perf_counter()
        torch.autograd.backward([left @ right], [gradient])
        finish(device)
    return time.perf_counter() - start


def device_of(name: str, *, index: int = 0) -> torch.device:
    """Return the device; `auto` is the GPU of this index, if any. Raises DescriptionError."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DescriptionError(
            f"--device {name} on a machine without a usable GPU",
            expected="cpu, or a GPU that torch can use (`polyrhythm doctor` says why not)",
            fix="use --device cpu",
        )
    return torch.device("cuda", index % torch.cuda.device_count())


def check_usable(device: torch.device) -> None:
    """Refuse a device that is neither a CPU nor a GPU of this machine; raises LaunchError."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < num_gpus):
        return
    wrong, expected = f"device={str(device)!r}", "a CPU or a CUDA device"
    fix = "pass 'cuda' or 'cpu', or omit device="
    if device.type == "cuda" and not num_gpus:
        wrong += " on a machine without a usable GPU"
        expected = "a GPU that torch can use (`polyrhythm doctor` says why not)"
        fix = "pass 'cpu', or omit device=: then a GPU is used if there is one"
    elif device.type == "cuda":
        wrong += f" on a machine with {num_gpus} GPU{'s' * (num_gpus > 1)}"
        expected = f"an index below {num_gpus}"
        fix = "pass 'cuda': each process of a machine then uses the GPU of its local rank"
    raise LaunchError(wrong, expected=expected, fix=fix)


def device_text(device: torch.device) -> str:
    """Describe what a time depends on: the processor, its threads and torch's version."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}"


def finish(device: torch.device) -> None:
    """Wait until all kernels on the device are done, so that their end is timed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fitting_size(device: torch.device, dtype: torch.dtype) -> int:
    """Return the rows for a product that takes long enough, or the most that memory allows."""
    size = _SMALLEST
    taken = _better_of_two(size, device, dtype)
    while taken < _LONG_ENOUGH and size < _LARGEST:
        try:
            taken = _better_of_two(2 * size, device, dtype)
        except RuntimeError as error:
            if is_out_of_memory(error):
                break
            raise
        size *= 2
    return size


def _better_of_two(size: int, device: torch.device, dtype: torch.dtype) -> Seconds:
    """Return the shorter of two measurements: the first may include loading a library."""
    return min(product(size, device, dtype) for _ in range(2))

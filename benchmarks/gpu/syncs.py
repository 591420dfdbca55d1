"""How often the main thread waits for the GPU in a step, as torch's profiler records it."""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.model import TINY, Size, gpt
from benchmarks.gpu.single import trainer

_BLOCKING = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
_QUERY = "cudaEventQuery"  # one after the other they are a loop that spins, and waits
_LONGEST_RUN = 16  # of queries that is no loop: times of logged actions take a dozen
_WARM_UP, _NUM_STEPS = 15, 10
_END = "the end of the last step"


class _MeasuredError(Exception):
    """Ends training without the save at its end, which would take most of the time."""


def measure(size: Size, *, quick: bool) -> dict[str, float]:
    """Return the blocking calls of the main thread per step; a copy of pageable memory is one."""
    size, num_calls = TINY if quick else size, 0
    model = gpt(size).cpu()  # as users build it
    # Without `acc_events` torch 2.11 warns of cycles, of which there is one.
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    profiler = profile(activities=activities, acc_events=True)

    def before_step(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == _WARM_UP:
            profiler.start()
        elif num_calls == _WARM_UP + _NUM_STEPS:
            with record_function(_END):  # what follows is the profiler's own wait for the GPU
                pass
            profiler.stop()
            raise _MeasuredError

    model[0].register_forward_pre_hook(before_step)
    num_steps = _WARM_UP + _NUM_STEPS + 2
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.suppress(_MeasuredError),
        trainer(size, model, num_steps, folder) as made,
    ):
        made.fit(max_steps=num_steps, progress=False)
    return {"host_syncs": _count(profiler) / _NUM_STEPS}


def _count(profiler: "profile") -> int:
    found = profiler.events()  # type: ignore[no-untyped-call]
    end = next(event.time_range.start for event in found if event.name == _END)
    events = [
        event for event in found if event.device_type.name == "CPU" and event.time_range.start < end
    ]
    # The thread that runs the forward is the main one.
    threads = Counter(event.thread for event in events if event.name == "aten::embedding")
    main = threads.most_common(1)[0][0]
    names = [event.name for event in _in_order(events) if event.thread == main]
    calls = Counter(names)
    copies = sum("Pageable" in event.name for event in found)
    runs = (len(list(run)) for name, run in groupby(names) if name == _QUERY)
    return sum(calls[name] for name in _BLOCKING) + copies + sum(n > _LONGEST_RUN for n in runs)


def _in_order(events: Iterable[Any]) -> list[Any]:
    """Sort by time, without what queries are mixed with."""
    kept = [event for event in events if event.name not in ("cudaStreamIsCapturing", "INVALID")]
    return sorted(kept, key=lambda event: event.time_range.start)

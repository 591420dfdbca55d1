"""Gradients on their way to their mean, and updated weights on their way back, bucket by bucket.

A bucket leaves when backward has filled it, but not before those that come before it on all
workers: from the last of the forward to the first. The late ones follow when backward is over, if
anybody has a gradient for them. What a step has made of the weights goes out in the order of the
forward. With buckets that are whole the mean of the gradients comes back instead, still in
backward: a plain all-reduce.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto

import torch
from torch import Tensor, nn

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.run.decoupled.bucket import Bucket, Segment
from polyrhythm.run.decoupled.grouping import Group
from polyrhythm.run.decoupled.halves import Half, Halves, PeerHalves, Pending
from polyrhythm.run.decoupled.handed_over import has_gradient
from polyrhythm.run.decoupled.nccl_halves import NcclHalves
from polyrhythm.run.decoupled.reducing import Reducing
from polyrhythm.types import Seconds


class Phase(Enum):
    """Of the gradients since the last step."""

    EMPTY = auto()
    FILLING = auto()  # some have been taken
    FINISHED = auto()  # their mean is here


class Averaging:
    """Of one worker; all do the same in the same order. `control` carries flags.

    `tied` are parameters whose gradients are complete when they are there: nobody calls `take`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        tied: Iterable[int],
        control: PeerHalves,
        reducing: Reducing,
    ) -> None:
        self._parameters, self._names = parameters, names
        self._tied = [parameters[index] for index in tied]
        self._control, self._reducing = control, reducing
        self.buckets: list[Bucket] = []
        # In the groups of the optimizer like others, but with a gradient of 0, or nan if one of
        # anybody's is not finite: a GradScaler leaves the step out on all workers, or on none.
        self.scout = nn.Parameter(torch.zeros(1, device=parameters[0].device))
        self._phase = Phase.EMPTY
        # By parameter, whether there is a gradient; and last, whether one is not finite.
        self._used = torch.zeros(len(parameters) + 1, dtype=torch.uint8)
        self._gathering: dict[int, Pending] = {}  # by number of bucket
        self._leaving: list[Bucket] = []  # that have not left yet: the next one is the last
        self._scattering: list[Pending] = []
        self._returning: list[Pending] = []
        self._sums: list[Tensor] = []  # of the gradients of buckets that have left
        self._versions: list[int] = []  # of parameters, when they were sent on
        self._waited: Seconds = 0.0  # by training, for others
        self._exchange: Seconds = 0.0  # of both halves, as if all had been there from the beginning
        self._error: PeerError | None = None  # after which nothing is what it should be

    @property
    def has_gradients(self) -> bool:
        return self._phase is not Phase.EMPTY or any(map(has_gradient, self._tied))

    @property
    def segments(self) -> Iterator[Segment]:
        return (segment for bucket in self.buckets for segment in bucket.segments)

    def regroup(self, groups: Sequence[Group], halves: Halves, *, whole: bool) -> None:
        """With nothing on its way."""
        self.halves, self.is_whole = halves, whole
        self.buckets = [
            Bucket(
                number,
                [(index, self._parameters[index]) for index in group.indices],
                rank=halves.rank,
                num_workers=halves.num_workers,
                whole=whole,
                late=group.is_late,
            )
            for number, group in enumerate(groups)
        ]
        self._bucket_of = {i: bucket for bucket in self.buckets for i in bucket.parameters}
        self.empty()

    def check_arrived(self, index: int) -> None:
        """A parameter that has a gradient was used, and then it must have been waited for."""
        if self._bucket_of[index].number in self._gathering:
            raise PolicyError(
                f"{self._names[index]} was used before its update had arrived",
                expected="modules that are called to use their parameters, as in the first step",
                fix="call optimizer.synchronize() before a forward that reads weights of modules "
                "it does not call",
            )

    def take(self, index: int) -> None:
        """The gradient of a parameter, which backward has just left in `.grad`."""
        self._check_error()
        if self._phase is Phase.FINISHED:  # looked at, but not stepped with
            self.empty()
        bucket = self._bucket_of[index]
        if bucket.has(index):
            raise PolicyError(
                f"a second gradient of {self._names[index]} since the last step",
                expected="a step() after each backward, or optimizer.zero_grad()",
                fix="call optimizer.zero_grad(), not the model's: the first one has gone already",
            )
        bucket.fill(index)
        if self._phase is Phase.EMPTY:
            self._expect_gradients()
        self._phase = Phase.FILLING
        self._used[index] = 1
        self._let_leave()

    def finish(self) -> None:
        """Until the mean of all gradients is there; those that nobody has computed are None."""
        self._check_error()
        if self._phase is Phase.FINISHED:
            return
        began = time.perf_counter()
        try:
            self._finish()
        except PeerError as error:
            self._error = error
            raise
        self._waited += time.perf_counter() - began
        self._phase = Phase.FINISHED

    def expect_weights(self) -> None:
        """From the others, whose steps may be ahead of this one's; of late buckets, not yet."""
        for bucket in self.buckets:
            if not bucket.is_whole and not bucket.is_late:
                self.halves.expect(bucket.weights, bucket.number, Half.GATHER)

    def send_on(self, buckets: Iterable[Bucket]) -> None:
        """What has become of their weights; nothing has of late ones that nobody used."""
        for bucket in buckets:
            if not bucket.is_whole and (self._is_used(bucket) or not bucket.is_late):
                pending = self.halves.gather(bucket.weights, bucket.number)
                if self.halves.waits_on_host:
                    pending = self._reducing.start(self._timed(pending))
                self._gathering[bucket.number] = pending

    def await_parameters(self, indices: Iterable[int]) -> None:
        """Before they are used; again and again, if need be."""
        for index in indices:
            number = self._bucket_of[index].number
            if number in self._gathering:
                began = time.perf_counter()
                self._gathering[number].wait()  # raises each time, if the weights are not whole
                self._waited += time.perf_counter() - began
                del self._gathering[number]
                self._check_untouched(self._bucket_of[index])

    def await_all(self) -> None:
        self.await_parameters(range(len(self._parameters)))

    def averaged(self) -> tuple[Seconds, Seconds]:
        """Waits of training, and the longest exchange, since this was asked the last time."""
        found = self._waited, self._exchange
        self._waited = self._exchange = 0.0
        return found

    def mark_changed(self) -> None:
        """Of a graph that was made before the step, autograd then says that it is out of date."""
        torch.autograd.graph.increment_version(
            [p for p, used in zip(self._parameters, self._used, strict=False) if used]
        )
        self._versions = [parameter._version for parameter in self._parameters]

    def empty(self) -> None:
        """Ready for the next backward."""
        for bucket in self.buckets:
            bucket.empty()
        self._used.zero_()
        for segment in self.segments:
            segment.parameter.grad = None
        self._leaving = [bucket for bucket in self.buckets if not bucket.is_late]
        self._phase, self.scout.grad = Phase.EMPTY, None

    def _check_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_untouched(self, bucket: Bucket) -> None:
        for index, parameter in bucket.parameters.items():
            if parameter._version != self._versions[index]:
                raise PolicyError(
                    f"{self._names[index]} was changed while its update was on its way",
                    expected="weights left alone between step() and the next forward",
                    fix="call optimizer.synchronize() before changing weights by hand",
                )

    def _is_used(self, bucket: Bucket) -> bool:
        return any(self._used[index] for index in bucket.parameters)

    def _expect_gradients(self) -> None:
        for bucket in self._leaving[::-1]:
            self.halves.expect(bucket.gradients, bucket.number, Half.SCATTER)
        self._control.expect(self._used, 0, Half.FLAGS)

    def _let_leave(self) -> None:
        while self._leaving and self._leaving[-1].is_full:
            bucket = self._leaving.pop()
            self._fill_up(bucket)  # with those of frozen parameters
            self._sums.append(_sum(bucket.gradients))
            self._scatter(bucket)

    def _finish(self) -> None:
        for bucket in self._leaving:
            self._fill_up(bucket)
        self._let_leave()
        late = [bucket for bucket in self.buckets if bucket.is_late]
        for bucket in late:
            if any(has_gradient(p) or self._used[i] for i, p in bucket.parameters.items()):
                self._fill_up(bucket)
                self._sums.append(_sum(bucket.gradients))
        bad = torch.stack([self.scout.new_zeros(()), *self._sums]).isfinite().logical_not().any()
        self._sums.clear()
        if isinstance(self.halves, NcclHalves):  # without keeping the processor
            bad = bad.to(torch.uint8)
            self.halves.unite(bad)
        else:
            self._used[-1] = bad
        self._control.unite(self._used, 0).wait()
        for bucket in late:
            if self._is_used(bucket):
                self._fill_up(bucket)
                self._scatter(bucket)
        for pending in self._scattering:
            pending.wait()
        for pending in self._returning:
            pending.wait()
        self._scattering.clear()
        self._returning.clear()
        for segment in self.segments:
            segment.parameter.grad = segment.gradient if self._used[segment.index] else None
        flag = bad.bool() if isinstance(self.halves, NcclHalves) else self._used[-1].bool()
        self.scout.grad = torch.zeros_like(self.scout).masked_fill_(
            flag.to(self.scout.device), torch.nan
        )

    def _fill_up(self, bucket: Bucket) -> None:
        """With what is still missing, to be complete; once."""
        for index in bucket.missing:
            if has_gradient(self._parameters[index]):
                self._used[index] = 1
            bucket.fill(index)

    def _timed(self, pending: Pending) -> Callable[[], None]:
        """The second half begins at about the same time on all workers; the first is as long."""
        began = time.perf_counter()

        def wait() -> None:
            pending.wait()
            self._exchange = max(self._exchange, 2 * (time.perf_counter() - began))

        return wait

    def _scatter(self, bucket: Bucket) -> None:
        pending = self.halves.scatter(bucket.gradients, bucket.number)
        if self.halves.waits_on_host:
            pending = self._reducing.start(self._reduce(bucket, pending))
        self._scattering.append(pending)
        if bucket.is_whole and not self.halves.waits_on_host:
            self._returning.append(self.halves.gather(bucket.gradients, bucket.number))

    def _reduce(self, bucket: Bucket, pending: Pending) -> Callable[[], None]:
        def reduce() -> None:
            pending.wait()
            if bucket.is_whole:
                self._returning.append(self.halves.gather(bucket.gradients, bucket.number))

        return reduce


def _sum(flat: Tensor) -> Tensor:
    """Not finite, if one of them is not."""
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return real.sum(dtype=torch.float32)

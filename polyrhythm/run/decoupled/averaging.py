"""Gradients on their way to their mean, and updated weights on their way back, bucket by bucket.

A bucket leaves when backward has filled it, but not before those that come before it on all
workers: from the last of the forward to the first, then the late ones. What a step has made of the
weights goes out in the order of the forward. With buckets that are whole the mean of the gradients
comes back instead, still in backward: a plain all-reduce.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from polyrhythm.errors import PolicyError
from polyrhythm.run.decoupled.bucket import Bucket, Segment
from polyrhythm.run.decoupled.grouping import Group
from polyrhythm.run.decoupled.halves import Half, Halves, PeerHalves, Pending
from polyrhythm.run.decoupled.nccl_halves import NcclHalves
from polyrhythm.run.decoupled.reducing import Reducing


class Averaging:
    """Of one worker; all do the same in the same order. `control` carries flags."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        control: PeerHalves,
        reducing: Reducing,
    ) -> None:
        self._parameters, self._names = parameters, names
        self._control, self._reducing = control, reducing
        self.buckets: list[Bucket] = []
        self.has_gradients = False  # since the last step
        self._is_finished = False  # the mean is here, too
        # By parameter, whether there is a gradient; and last, whether one is not finite.
        self._used = torch.zeros(len(parameters) + 1, dtype=torch.uint8)
        self._gathering: dict[int, Pending] = {}  # by number of bucket
        self._leaving: list[Bucket] = []  # that have not left yet: the next one is the last
        self._scattering: list[Pending] = []
        self._returning: list[Pending] = []
        self._sums: list[Tensor] = []  # of the gradients of buckets that have left

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
        if self._is_finished:  # looked at, but not stepped with
            self.empty()
        if not self.has_gradients:
            self._expect_gradients()
        self.has_gradients = True
        self._used[index] = 1
        self._bucket_of[index].fill(index)
        self._let_leave()

    def finish(self) -> None:
        """Until the mean of all gradients is there; those that nobody has computed are None."""
        if self._is_finished:
            return
        for bucket in self._leaving:
            self._fill_up(bucket)
        self._let_leave()
        bad = torch.stack(self._sums).isfinite().logical_not().any()
        self._sums.clear()
        if not isinstance(self.halves, NcclHalves):
            self._used[-1] = bad
        flags = self._control.unite(self._used, 0)
        for pending in self._scattering:
            pending.wait()
        for pending in self._returning:
            pending.wait()
        flags.wait()
        self._scattering.clear()
        self._returning.clear()
        for segment in self.segments:
            segment.parameter.grad = segment.gradient if self._used[segment.index] else None
        self._spoil(bad)
        self._is_finished = True

    def expect_weights(self) -> None:
        """From the others, whose steps may be ahead of this one's; of late buckets, not yet."""
        for bucket in self.buckets:
            if not bucket.is_whole and not bucket.is_late:
                self.halves.expect(bucket.weights, bucket.number, Half.GATHER)

    def send_on(self, buckets: Iterable[Bucket]) -> None:
        """What has become of their weights; nothing has of late ones that nobody used."""
        for bucket in buckets:
            is_used = any(self._used[index] for index in bucket.parameters)
            if not bucket.is_whole and (is_used or not bucket.is_late):
                pending = self.halves.gather(bucket.weights, bucket.number)
                if self.halves.waits_on_host:
                    pending = self._reducing.start(pending.wait)
                self._gathering[bucket.number] = pending

    def await_parameters(self, indices: Iterable[int]) -> None:
        """Before they are used; again and again, if need be."""
        for index in indices:
            pending = self._gathering.pop(self._bucket_of[index].number, None)
            if pending is not None:
                pending.wait()

    def await_all(self) -> None:
        for number in list(self._gathering):
            self._gathering.pop(number).wait()

    def empty(self) -> None:
        """Ready for the next backward."""
        for bucket in self.buckets:
            bucket.empty()
        self._used.zero_()
        late = [bucket for bucket in self.buckets if bucket.is_late]
        self._leaving = late[::-1] + [bucket for bucket in self.buckets if not bucket.is_late]
        self.has_gradients = self._is_finished = False

    def _expect_gradients(self) -> None:
        for bucket in self._leaving[::-1]:
            self.halves.expect(bucket.gradients, bucket.number, Half.SCATTER)
        self._control.expect(self._used, 0, Half.FLAGS)

    def _let_leave(self) -> None:
        while self._leaving and self._leaving[-1].is_full:
            bucket = self._leaving.pop()
            self._fill_up(bucket)  # with those of frozen parameters
            self._sums.append(bucket.gradients.sum(dtype=torch.float32))
            pending = self.halves.scatter(bucket.gradients, bucket.number)
            if self.halves.waits_on_host:
                self._scattering.append(self._reducing.start(self._reduce(bucket, pending)))
                continue
            self._scattering.append(pending)
            if bucket.is_whole:
                self._returning.append(self.halves.gather(bucket.gradients, bucket.number))

    def _fill_up(self, bucket: Bucket) -> None:
        for index in bucket.missing:
            self._used[index] = self._parameters[index].grad is not None
            bucket.fill(index)

    def _reduce(self, bucket: Bucket, pending: Pending) -> Callable[[], None]:
        def reduce() -> None:
            pending.wait()
            if bucket.is_whole:
                self._returning.append(self.halves.gather(bucket.gradients, bucket.number))

        return reduce

    def _spoil(self, bad: Tensor) -> None:
        """A gradient on each worker, if one of anybody's is not finite.

        A GradScaler then leaves the step out on all workers, or else they would part.
        """
        used = (s.gradient for s in self.segments if s.parameter.grad is not None)
        gradient = next(used, None)
        if isinstance(self.halves, NcclHalves):  # without keeping the processor
            flag = bad.to(torch.uint8)
            self.halves.unite(flag)
            if gradient is not None:
                gradient[:1].masked_fill_(flag.bool(), torch.nan)
        elif self._used[-1] and gradient is not None:
            gradient[0] = torch.nan
